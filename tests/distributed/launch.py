"""Real processes of one data-parallel run (gloo), with the environment that ``paddle.distributed.launch`` gives them.

A driver imports Paddle once and forks the ranks before any of them has used it: starting W interpreters would cost more
than what they are started for.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Callable

TIME_LIMIT = 300.0


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def environment(rank: int, endpoints: list[str]) -> dict[str, str]:
    return {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(len(endpoints)),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_DISTRI_BACKEND": "gloo",
    }


def fork_ranks(world: int, task: Callable[[], Any], folder: Path) -> list[int]:
    """Process ids of W ranks that run `task`; what they print is in ``<folder>/rank<r>.log``."""
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(world)]
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            _be(rank, endpoints, task, folder)
        children.append(child)
        if rank == 0 and world > 1:
            _wait_until_listening(endpoints[0])
    return children


def _wait_until_listening(endpoint: str) -> None:
    """A rank that finds no store at rank 0 tries again after three seconds only."""
    host, port = endpoint.split(":")
    for _ in range(100):
        time.sleep(0.02)
        with socket.socket() as probe:
            # Bound, not connected: the store would take a connection for a rank.
            try:
                probe.bind((host, int(port)))
            except OSError:
                break
    time.sleep(0.05)


def _be(rank: int, endpoints: list[str], task: Callable[[], Any], folder: Path) -> None:
    code = 1
    try:
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(environment(rank, endpoints))
        task()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(children: list[int], limit: float = TIME_LIMIT) -> list[int]:
    """Exit codes (negative: the signal), as of subprocess; kills what is left when the limit has passed."""
    end = time.monotonic() + limit
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for child in children:
            if child in codes:
                continue
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(child, 0 if time.monotonic() > end else os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return [codes[child] for child in children]


def run_ranks(world: int, task: Callable[[], Any], folder: Path) -> None:
    """Runs `task` on W ranks to its end; SystemExit with what they printed where one fails."""
    codes = wait(fork_ranks(world, task, folder))
    if any(codes):
        logs = "\n".join(f"--- rank {r}\n{(folder / f'rank{r}.log').read_text()}" for r in range(world))
        raise SystemExit(f"the ranks ended with {codes}\n{logs}")
