"""look into the folder of a cache on disk, check it, or empty it

The folder is that of `hibachi serve --kv-disk`, also while servers use it. A
root stands for a model and all else that the bits of its entries depend on.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from hibachi.cli.main import add_command
from hibachi.common.phases import phase, short_bytes
from hibachi.engine.tiers.disk import HEADER, Header, SegmentFile, alone, digest_of, listing, records, room_of
from hibachi.errors import ConfigError


def arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(required=True, metavar="WHAT")
    for name, run in (("ls", ls), ("verify", verify), ("clear", clear)):
        sub = add_command(what, name, run.__doc__, run, lambda sub: None)
        sub.add_argument("folder", type=Path, metavar="DIR")
        if run is ls:
            sub.add_argument("--json", action="store_true", help="write JSON, for programs")
        if run is clear:
            sub.add_argument("--root", metavar="HEX", help="remove what is of this root only")


def ls(args: argparse.Namespace) -> int:
    """what each root has, the newest first"""
    files = listing(args.folder)[::-1]
    names: dict[bytes, set[bytes]] = {file.root: set() for file in files}
    for file in files:
        names[file.root].update(found.name for _, found, _ in records(file) if isinstance(found, Header))
    roots = [_facts(root.hex(), len(found), [f for f in files if f.root == root]) for root, found in names.items()]
    total = _facts("total", sum(map(len, names.values())), files)
    if args.json:
        print(json.dumps({"roots": roots, "total": total}, indent=2))
    else:
        print(f"{'root':32} {'entries':>10} {'bytes':>10} {'segments':>9}")
        for one in [*roots, total]:
            print(f"{one['root']:32} {one['entries']:10,} {short_bytes(one['bytes']):>10} {one['segments']:9,}")
    return 0


def _facts(root: str, entries: int, files: list[SegmentFile]) -> dict[str, Any]:
    return {"root": root, "entries": entries, "bytes": sum(file.size for file in files), "segments": len(files)}


def verify(args: argparse.Namespace) -> int:
    """read everything; the exit status is 1 if something is damaged

    What is damaged is never used. A last record that was being written when its
    process was killed is told, and counts as nothing.
    """
    with alone(args.folder):
        files = [(file, room_of(file)[1]) for file in listing(args.folder)]
    sound = damaged = 0
    with phase("reading", len(files), "segments") as p:
        for done, (file, writing) in enumerate(files):
            p.update(done)
            for at, found, opened in records(file):
                what = "the header is damaged, and what follows is lost"
                if isinstance(found, Header):
                    if digest_of(found.name, os.pread(opened, found.length, at + HEADER)) == found.digest:
                        sound += 1
                        continue
                    what = f"the data of {found.name.hex()} are damaged ({found.length} bytes)"
                elif found == "torn":
                    if not writing:
                        print(f"{file.path} at {at}: the last record is cut off; its process ended as it wrote it")
                    continue
                damaged += 1
                print(f"{file.path} at {at}: {what}")
    print(f"sound: {sound:,}, damaged: {damaged:,}, in segments: {len(files):,}")
    return 1 if damaged else 0


def clear(args: argparse.Namespace) -> int:
    """remove all entries, without asking

    Servers that run go on, and begin anew.
    """
    with alone(args.folder):
        files = listing(args.folder)
        if others := {*os.listdir(args.folder)} - {file.path.name for file in files}:
            raise ConfigError(
                f"{args.folder} holds what is not of a cache, such as {min(others)!r}. Name the folder of a cache, or "
                "move that elsewhere."
            )
        if args.root is not None:
            files = [file for file in files if file.root.hex() == args.root.lower()]
            if not files:
                raise ConfigError(f"{args.folder} has nothing of a root {args.root!r}; `hibachi cache ls` lists them.")
        writing = sum(room_of(file)[1] for file in files)
        for file in files:
            file.path.unlink(missing_ok=True)
    told = f", {writing:,} held by processes that run, which begin others" if writing else ""
    print(f"segments removed: {len(files):,} of {short_bytes(sum(file.size for file in files))}{told}")
    return 0
