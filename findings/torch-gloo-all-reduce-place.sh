#!/bin/sh
# torch 2.13.0, torch.distributed with gloo on the CPU: from three ranks on, all_reduce adds the ranks' numbers in an
# order that depends on the place in the buffer. 64 equal rows come back with several different rows, and a row alone
# has other bits than the same row in a buffer of many. With two ranks there is one order, so a test with two ranks
# never shows it. A server that adds up tensor-parallel parts so gives a request other bits by its place in the batch.
# all_to_all_single, adding in one's own order, and all_gather keep the bits. Seen: 2 ranks 1 row, as alone; 3 ranks 5
# different rows, 4 ranks 4, none of them with the bits of the row alone.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/ranks.py" <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, size, store, found):
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    row = torch.randn(512, generator=torch.Generator().manual_seed(rank))
    alone, many = row.clone(), row.repeat(64, 1)
    dist.all_reduce(alone)
    dist.all_reduce(many)
    if rank == 0:
        found.put((size, len(many.unique(dim=0)), int((many == alone).all(dim=1).sum())))
    dist.destroy_process_group()


if __name__ == "__main__":
    found = mp.get_context("spawn").SimpleQueue()
    for size in (2, 3, 4):
        mp.spawn(work, (size, f"{sys.argv[1]}/store{size}", found), nprocs=size)
        size, distinct, like_alone = found.get()
        print(f"{size} ranks: {distinct} different rows of 64 equal ones, {like_alone} with the bits of the row alone")
        assert (distinct, like_alone) == (1, 64) if size == 2 else distinct > 1 and like_alone == 0
PY
"$folder/venv/bin/python" "$folder/ranks.py" "$folder"
