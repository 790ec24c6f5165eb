#!/bin/bash
# Pre-training on two nodes of eight GPUs under SLURM: `sbatch docs/examples/slurm.sh`. Submitted again, it continues.
#SBATCH --job-name=exlm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
set -euo pipefail

run=/shared/runs/text-base               # on a disk that all nodes see
export EXLM_CACHE_DIR=/shared/exlm-cache  # likewise
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240 # seconds to write a checkpoint before torchrun kills the ranks
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

if [ -f "$run/recipe.yaml" ]; then
  arguments=(--resume "$run")
else
  arguments=(--recipe text-base --set "data.train=/shared/corpus/*.jsonl.gz" --out "$run")
fi
# --signal warns srun 300 s before the end; torchrun hands the SIGTERM on, and every rank stops after the same step
srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=8 \
  --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head:29500" \
  -m exlm_cli pretrain "${arguments[@]}" --device cuda
