#!/usr/bin/env bash
# Submit a job array that computes one output in parts, and a job that completes it afterwards. No dask is needed.
#
#     deploy/slurm_submit.sh 64 VOLUME --out OUTPUT [other options of `znnpy infer`]
#
# `64%16` in place of 64 runs 16 parts at a time.

set -euo pipefail

if (($# < 2)) || ! [[ $1 =~ ^[1-9][0-9]*(%[1-9][0-9]*)?$ ]]; then
    echo "usage: $0 PARTS VOLUME --out OUTPUT [options of znnpy infer]" >&2
    exit 2
fi
parts=$1
shift
folder=$(dirname "$(realpath "${BASH_SOURCE[0]}")")

array=$(sbatch --parsable --array="1-$parts" "$folder/slurm_parts.sh" "$@")
array=${array%%;*} # the name of the cluster may follow
finish=$(sbatch --parsable --dependency="afterok:$array" --kill-on-invalid-dep=yes "$folder/slurm_finish.sh" "$@")
echo "parts: job $array, completed by job ${finish%%;*}"
