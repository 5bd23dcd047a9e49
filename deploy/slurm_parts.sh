#!/usr/bin/env bash
# Compute one part of an output in each task of a job array; slurm_finish.sh completes the output.
#
#     sbatch --array=1-64 deploy/slurm_parts.sh VOLUME --out OUTPUT [other options of `znnpy infer`]
#     PARTS=64 sbatch --array=7,12 deploy/slurm_parts.sh ...    (two of these again)
#
# Set the numbers for your nodes: a task has all cores and all GPUs of its node, or a share of them. On nodes with GPUs
# add `#SBATCH --gpus-per-node=4` here, and `--gpus all` to the options.

#SBATCH --job-name=znnpy-parts
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=32
#SBATCH --mem=128G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=znnpy-%A_%a.log

set -euo pipefail

container=() # with Apptainer: (apptainer exec --nv --bind /data /data/znnpy.sif)

: "${SLURM_MEM_PER_NODE:?give the memory of a node in the script, with --mem}"
parts=${PARTS:-$SLURM_ARRAY_TASK_COUNT}

exec "${container[@]}" znnpy infer "$@" --part "$SLURM_ARRAY_TASK_ID/$parts" \
    --threads "$SLURM_CPUS_PER_TASK" --ram "$((SLURM_MEM_PER_NODE * 3 / 4))M"
