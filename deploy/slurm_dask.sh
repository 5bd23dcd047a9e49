#!/usr/bin/env bash
# Compute one output on several nodes: a scheduler of dask and `znnpy infer` on the first node, a worker on each node.
#
#     sbatch --nodes=8 deploy/slurm_dask.sh VOLUME --out OUTPUT [other options of `znnpy infer`]
#
# Set the numbers for your nodes: one worker has all cores and all GPUs of its node. Submit the same line again to go on
# after a time limit. On nodes with GPUs add `#SBATCH --gpus-per-node=4` here, and `--gpus all` to the options.

#SBATCH --job-name=znnpy
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --mem=128G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=znnpy-%j.log

set -euo pipefail

container=() # with Apptainer: (apptainer exec --nv --bind /data /data/znnpy.sif)
network=()   # on nodes with several networks: (--interface ib0)

: "${SLURM_MEM_PER_NODE:?give the memory of a node in the script, with --mem}"
limit="$((SLURM_MEM_PER_NODE * 9 / 10))MiB" # of a worker, of which znnpy takes three quarters
scheduler_file="$PWD/znnpy-$SLURM_JOB_ID.json" # in a folder that all nodes see
rm -f "$scheduler_file" # of an earlier attempt at this job

jobs=() # processes that are ended, in this order: the workers before the scheduler
stop() {
    for job in "${jobs[@]}"; do
        kill "$job" 2>/dev/null || true
        wait "$job" 2>/dev/null || true
    done
    rm -f "$scheduler_file"
}
trap stop EXIT

"${container[@]}" dask scheduler --scheduler-file "$scheduler_file" --port 0 --no-dashboard "${network[@]}" &
jobs=($! "${jobs[@]}")
for _ in {1..120}; do
    [[ -s $scheduler_file ]] && break
    sleep 1
done

srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 --wait=0 \
    "${container[@]}" dask worker --scheduler-file "$scheduler_file" --nworkers 1 --nthreads "$SLURM_CPUS_PER_TASK" \
    --memory-limit "$limit" --local-directory "${TMPDIR:-/tmp}" --death-timeout 300 --no-dashboard "${network[@]}" &
jobs=($! "${jobs[@]}")

"${container[@]}" znnpy infer "$@" --cluster "$scheduler_file" --resume
