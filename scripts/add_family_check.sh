#!/usr/bin/env bash
# The recipe "Adding a drafter family" of CONTRIBUTING.md, carried out for a toy family in a copy of the workspace: the
# models' test suites, then training, evaluation and `doctor` by the program itself. It compiles the workspace from
# nothing into `target/tmp/add-family/target`, which takes as long as a first build, so the continuous
# check only asserts that the four pieces of the recipe are all that the copy differs in.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo test --release --workspace --locked --test add_family -- --include-ignored --test-threads=1
