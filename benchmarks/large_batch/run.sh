#!/usr/bin/env bash
# Trains every row of the large-batch table, or what is left of it, and writes the table. README.md says what it needs.
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH="$PWD/.venv/bin:$PATH"

sweep() {
    fourmin train -m --config-dir benchmarks/large_batch/conf resume=true "hydra.sweep.dir=runs/large_batch/$1" "${@:2}"
    python benchmarks/large_batch.py "runs/large_batch/$1"
}

sweep first_seed seed=1 'experiment=glob([alexnet_*,resnet_*])'
sweep more_seeds seed=2,3 'experiment=glob(alexnet_*,exclude=alexnet_larger_*)'
# FP16 and FP32 are closer than three seeds tell.
sweep fp16_seeds seed=4,5 experiment=alexnet_bn5,alexnet_fp16
