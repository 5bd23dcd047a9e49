#!/usr/bin/env bash
# Complete an output whose parts are computed. What is missing is computed here.
#
#     sbatch --dependency=afterok:JOB deploy/slurm_finish.sh VOLUME --out OUTPUT [the options of slurm_parts.sh]

#SBATCH --job-name=znnpy-finish
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=32
#SBATCH --mem=128G
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=znnpy-%j.log

set -euo pipefail

container=() # with Apptainer: (apptainer exec --nv --bind /data /data/znnpy.sif)

: "${SLURM_MEM_PER_NODE:?give the memory of a node in the script, with --mem}"

exec "${container[@]}" znnpy infer "$@" --finish \
    --threads "$SLURM_CPUS_PER_TASK" --ram "$((SLURM_MEM_PER_NODE * 3 / 4))M"
