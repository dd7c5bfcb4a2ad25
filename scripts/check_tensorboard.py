#!/usr/bin/env python3
"""Checks the event files of a run folder with TensorBoard's own reader.

usage: check_tensorboard.py RUN_FOLDER [--running]

RUN_FOLDER holds `tensorboard/` and `metrics.jsonl`. Every step of `metrics.jsonl` must stand exactly
once in the events, with the same loss (events hold f32). With `--running` the training may still be
writing: then the events must be a prefix, gapless, and readable without an error.
Needs the Python package `tensorboard`.
"""

import json
import pathlib
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read_events(root):
    scalars, pictures = {}, {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        accumulator.Reload()
        for tag in accumulator.Tags()["scalars"]:
            scalars.setdefault(tag, []).extend((e.step, e.value) for e in accumulator.Scalars(tag))
        for tag in accumulator.Tags()["images"]:
            pictures.setdefault(tag, []).extend(accumulator.Images(tag))
    return scalars, pictures


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--running"]
    running = "--running" in sys.argv
    if len(arguments) != 1:
        sys.exit(__doc__)
    folder = pathlib.Path(arguments[0])
    scalars, pictures = read_events(folder / "tensorboard")
    losses = sorted(scalars.get("train/loss", []))
    steps = [step for step, _ in losses]
    assert steps == list(range(1, len(steps) + 1)), f"steps are not 1, 2, ..: {steps}"
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    shared = min(len(records), len(losses))
    if not running:
        assert len(records) == len(losses), f"{len(records)} records, {len(losses)} events"
    for record, (step, loss) in zip(records[:shared], losses):
        assert record["step"] == step, (record["step"], step)
        assert abs(record["loss"] - loss) <= 1e-6 * abs(loss), (step, record["loss"], loss)
    for tag, images in sorted(pictures.items()):
        last = images[-1]
        print(f"  {tag}: {len(images)} pictures, last of {last.width} x {last.height}, {len(last.encoded_image_string)} bytes")
        assert last.encoded_image_string.startswith(b"\x89PNG"), tag
    print(f"{len(losses)} steps, each once; {len(scalars)} tags:")
    for tag in sorted(scalars):
        print(f"  {tag} ({len(scalars[tag])} values, last {scalars[tag][-1][1]:.6g})")


if __name__ == "__main__":
    main()
