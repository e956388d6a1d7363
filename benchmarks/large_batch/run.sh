#!/usr/bin/env bash
# Trains every row of the large-batch table, or what is left of it, and writes the table. README.md says what it needs.
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH="$PWD/.venv/bin:$PATH"

sweep() {
    fourmin train -m --config-dir benchmarks/large_batch/conf resume=true "hydra.sweep.dir=runs/large_batch/$1" "${@:2}"
    python benchmarks/large_batch.py "runs/large_batch/$1"
}

sweep alexnet_lars seed=1,2,3 experiment=alexnet_lars,alexnet_no_decay,alexnet_bn5,alexnet_fp16,alexnet_fp16_naive
sweep alexnet_sgd seed=1,2,3 experiment=alexnet_baseline,alexnet_sgd
sweep alexnet_larger seed=1 experiment=alexnet_larger_sgd,alexnet_larger_fp16
sweep resnet seed=1 experiment=resnet_sgd,resnet_sgd_tuned,resnet_lars,resnet_fp16_naive
sweep resnet_seeds seed=1,2,3 experiment=resnet_baseline,resnet_no_decay,resnet_fp16
