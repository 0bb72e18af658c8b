"""Checkpoints of one or several processes: written while training goes on, read by any number of processes.

`torch.distributed.checkpoint` plans which process writes and reads which part of which tensor. This module is its
storage: `checkpoint_files` for the tensors, `checkpoint` for the directory that counts once all parts are in it.
"""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from torch import Size, Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future as TorchFuture

from siamesenorm.errors import UserError
from siamesenorm.files import disk_errors
from siamesenorm.training.checkpoint import (
    IN_PARTS,
    WHOLE,
    Checkpoint,
    begin_checkpoint,
    finish_checkpoint,
    keep_last_weights,
    name_of_part,
    prune,
)
from siamesenorm.training.checkpoint_files import Piece, encode_tensors, write_synced

Groups = Mapping[str, Mapping[str, Tensor]]


class CheckpointSaver:
    """Writes the checkpoints of a run under `root`; all its processes call the same methods in the same order.

    The newest `keep` stay, and with `every` those of its multiples.
    """

    def __init__(self, root: Path, *, keep: int, every: int = 0) -> None:
        self.root, self.keep, self.every = root, keep, every
        # Its own processes' group: messages of the background thread must not mix with those of training.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._writing: tuple[Future[Any], _Writer] | None = None

    def save(self, step: int, tensors: Groups, state: Mapping[str, Any]) -> None:
        """Copy the tensors to host memory and write them in the background, once the save before has ended.

        `tensors` are groups by name, such as "model", whole or sharded, on any device; `state` is what JSON can hold,
        and that of the first process counts. A checkpoint of this step that is whole stays as it is. Raises what the
        save before raised: `StoppedError` for a full disk, with everything earlier untouched.
        """
        self.wait()
        writer = _Writer(self.root, step, state, self.keep, self.every)
        _allow_one_process()
        writing = async_save(
            _ordered(tensors), storage_writer=writer, process_group=self._group, no_dist=self._group is None
        )
        assert isinstance(writing, Future)
        self._writing = writing, writer

    def wait(self) -> None:
        """Wait until the last checkpoint is whole; raises what its writing raised."""
        if self._writing is not None:
            (writing, writer), self._writing = self._writing, None
            try:
                with _first_failure():
                    writing.result()
            finally:
                writer.discard()

    def read_into(self, tensors: Groups, checkpoint: Checkpoint) -> None:
        """Fill tensors, whole or sharded, from those of the same names in a checkpoint of any number of processes."""
        _allow_one_process()
        reader = _Reader(checkpoint)
        with _first_failure():
            load(_ordered(tensors), storage_reader=reader, process_group=self._group, no_dist=self._group is None)

    def end(self, *, keep_states: bool) -> None:
        """Remove what a finished run does not need, in the first process; with `keep_states` only leftovers."""
        if keep_states:
            with disk_errors(self.root):
                prune(self.root, self.keep, self.every)  # the process that wrote the last one may have died before
        else:
            keep_last_weights(self.root, self.every)

    def __enter__(self) -> Self:
        """Return the saver itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for the last checkpoint, whole or not."""
        if self._writing is not None:
            writing, writer = self._writing
            writing.exception()
            writer.discard()
        if self._group is not None:
            dist.destroy_process_group(self._group)


def _ordered(tensors: Groups) -> dict[str, dict[str, Tensor]]:
    """Return the tensors in an order that does not depend on how they came about.

    Processes that hold the same tensors take turns in this order: the same state then makes the same files.
    """
    return {group: dict(sorted(named.items())) for group, named in sorted(tensors.items())}


def _allow_one_process() -> None:
    # PyTorch warns of a missing process group, also where `no_dist` says so. Not undone: a thread of its own saves.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


@contextmanager
def _first_failure() -> Iterator[None]:
    """Raise what a process raised, in all of them; the line of a `UserError` before others."""
    try:
        yield
    except CheckpointException as failed:
        errors = [error for error, _ in failed.failures.values()]
        raise next((error for error in errors if isinstance(error, UserError)), errors[0]) from failed


class _Writer(StorageWriter):
    """Every process writes its part; the first one makes the directory, and finishes it when all have written.

    The first one's plan says where, so that all write into the directory of this very save.
    """

    def __init__(self, root: Path, step: int, state: Mapping[str, Any], keep: int, every: int) -> None:
        self.root, self.step, self.state, self.keep, self.every = root, step, state, keep, every
        self.unfinished: Path | None = None

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with self._errors():
            self.unfinished = begin_checkpoint(self.root, self.step)
        self.processes = len(plans)
        return [
            dataclasses.replace(plan, storage_data=(self.unfinished, number, len(plans)))
            for number, plan in enumerate(plans, start=1)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        directory, number, count = plan.storage_data
        groups: dict[str, list[WriteItem]] = {}
        for item in plan.items if directory is not None else ():
            groups.setdefault(item.index.fqn.partition(".")[0], []).append(item)
        results = []
        for group, items in groups.items():
            name = name_of_part(group, number, count)
            with self._errors():
                entry = write_synced(directory / name, _encode(items, planner, in_parts=count > 1))
            results.append(WriteResult(MetadataIndex(name), entry["bytes"], entry))
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self._errors():
            if self.unfinished is not None:
                files = {result.index.fqn: result.storage_data for each in results for result in each}
                schema = WHOLE if self.processes == 1 else IN_PARTS
                finish_checkpoint(self.unfinished, self.step, files, self.state, schema=schema)
                self.unfinished = None
            prune(self.root, self.keep, self.every)

    def _errors(self) -> AbstractContextManager[None]:
        return disk_errors(self.root / f"step-{self.step:08d}")

    def discard(self) -> None:
        """Remove what was not finished."""
        if self.unfinished is not None:
            shutil.rmtree(self.unfinished, ignore_errors=True)

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _encode(items: list[WriteItem], planner: SavePlanner, *, in_parts: bool) -> Iterator[bytes | memoryview]:
    tensors: dict[str, Tensor] = {}
    offsets: dict[str, tuple[int, ...]] = {}
    for item in items:
        name, tensor = item.index.fqn.partition(".")[2], planner.resolve_data(item)
        assert isinstance(tensor, Tensor)
        tensors[name], offsets[name] = tensor, tuple(item.index.offset or ())
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return encode_tensors(layout, tensors.__getitem__, offsets if in_parts else None)


class _Reader(StorageReader):
    """Every process reads the slices that it needs of every file."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.pieces: dict[MetadataIndex, Piece] = {}
        self.metadata = Metadata(state_dict_metadata={})
        for group, named in checkpoint.stored.items():
            for name, stored in named.items():
                key = f"{group}.{name}"
                chunks = [ChunkStorageMetadata(Size(p.offset), Size(p.shape)) for p in stored.pieces]
                properties = TensorProperties(dtype=stored.dtype)
                self.metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, Size(stored.shape), chunks)
                self.pieces |= {MetadataIndex(key, piece.offset): piece for piece in stored.pieces}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item)
            piece = self.pieces[item.storage_index]
            target.detach().copy_(piece.read(tuple(item.storage_offsets), tuple(item.lengths)))
            planner.commit_tensor(item, target)
        return _done(None)

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _done(value: Any) -> TorchFuture[Any]:
    future: TorchFuture[Any] = TorchFuture()
    future.set_result(value)
    return future
