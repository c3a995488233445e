"""
Fetches weights over loopback, as `weight_sync: http` does, beside the bare connection.

    python benchmarks/weight_fetch.py

The trainer's side is a process of its own. Bare: the same bytes from the same file through one connection, into memory
that is not kept. Fetched: with HTTP, into the file that the server loads. Turns alternate. What is kept costs a second
copy, so the bound is the connection and a copy of memory, one after the other.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from common import write
from measure import interleave, ratio
from rich.console import Console
from rich.table import Table

from mt_grpo.vllm_plugin.fetch import CHUNK, Fetcher
from mt_grpo.weights.network import _FileOffer

TARGET = 0.7


def offer(folder: Path, ends: Connection) -> None:
    """The trainer's side: offers a file by HTTP, and bare to whoever connects."""
    files = _FileOffer(folder, "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as bare, open(folder / "weights", "rb") as file:
        ends.send((files.url("127.0.0.1"), bare.getsockname()[1]))
        while True:
            connection, _ = bare.accept()
            with connection:
                connection.sendfile(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer bytes; nothing is written")
    args = parser.parse_args()
    size, repeats = (2**22, 2) if args.quick else (400_000_000, 9)
    ours, theirs = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        with open(folder / "weights", "wb") as file:
            for _ in range(0, size, CHUNK):
                file.write(torch.randint(256, (min(CHUNK, size - file.tell()),), dtype=torch.uint8).numpy().tobytes())
        trainer = multiprocessing.Process(target=offer, args=(folder, theirs), daemon=True)
        trainer.start()
        url, port = ours.recv()
        fetcher, buffer = Fetcher(name), memoryview(bytearray(CHUNK))
        source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

        def link() -> None:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                while connection.recv_into(buffer):
                    pass

        def fetch() -> None:
            fetcher.fetch(f"{url}/weights", size)

        functions = {"link": link, "copy": lambda: target.copy_(source), "fetch": fetch}
        for _ in range(2):  # memory is used for the first time, by each of the files that take turns
            interleave(functions, 1, time.perf_counter)
        seconds = interleave(functions, repeats)
        trainer.terminate()
        fetcher.close()
    both = zip(seconds["link"], seconds["copy"], strict=True)
    found = ratio({**seconds, "bound": [one + other for one, other in both]}, "bound", "fetch")
    table = Table(title=f"{size / 1e6:.0f} MB over loopback")
    for column in ("", "GB/s (best)", "bound / time (of minima)", "target"):
        table.add_column(column, justify="right" if column else "left")
    for kind in ("link", "copy", "fetch"):
        cells = [f"{found['median']:.2f} ({found['minimum']:.2f})", f">= {TARGET}"] if kind == "fetch" else ["", ""]
        table.add_row(kind, f"{size / min(seconds[kind]) / 1e9:.2f}", *cells)
    Console(width=100).print(table)
    if not args.quick:
        rows = [{"part": kind, "bytes": size, "wall": seconds[kind]} for kind in functions]
        rows[-1] |= {"wall ratio": found, "target": TARGET}
        write("weight_fetch", {"bytes": size, "repeats": repeats}, rows)


if __name__ == "__main__":
    main()
