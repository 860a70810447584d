"""One logger for the package: rank 0 to the terminal and to the run's log.txt, other ranks warnings only."""

import logging
import sys
from pathlib import Path


def to_terminal(rank: int) -> None:
    """Log this rank to stderr."""
    logger = logging.getLogger("wan_ds")
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(rank))
    logger.handlers = [handler]


def to_file(rank: int, path: Path) -> None:
    """Log rank 0 to a file as well."""
    if rank == 0:
        logging.getLogger("wan_ds").addHandler(file_handler(rank, path))


def file_handler(rank: int, path: Path) -> logging.Handler:
    """What adds a rank's messages to a file."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(_formatter(rank))
    return handler


def note(rank: int, path: Path, text: str) -> None:
    """Write an error of this rank to the file alone, whether or not it logs there."""
    handler = file_handler(rank, path)
    record = {"msg": text, "levelno": logging.ERROR, "levelname": "ERROR"}
    handler.handle(logging.makeLogRecord(record))
    handler.close()


def _formatter(rank: int) -> logging.Formatter:
    return logging.Formatter(f"%(asctime)s rank {rank} %(levelname).1s %(message)s", "%H:%M:%S")
