#!/usr/bin/env bash
# Several nodes with SLURM: sbatch examples/slurm.sh
# One task a rank, as many on every node; trainer=slurm takes the numbers from SLURM.
#SBATCH --job-name=fourmin
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
# SLURM warns the job before its time is up: it saves a checkpoint, ends, and is queued again.
#SBATCH --signal=SIGUSR1@120
set -euo pipefail

# srun of SLURM 22.05 and 23.02 does not take this from sbatch by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-8}"
# One folder whatever the number of starts, so that a job that was queued again goes on in it.
srun fourmin train experiment=imagenet_resnet50_8k trainer=slurm trainer.accelerator=gpu \
    run_dir="runs/imagenet_resnet50_8k/slurm-$SLURM_JOB_ID" "$@"
