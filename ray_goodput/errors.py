"""Every error a user can meet, in one tree.

GoodputError
├── ConfigError                   an argument or environment variable makes no sense
├── SessionError                  an API was called in the wrong place or order
├── StorageError                  an object store or disk said no
│   ├── ObjectNotFoundError       the object is not there
│   ├── ObjectChangedError        the object is not the one that was pinned
│   ├── NoCopyLeftError           no node has the object whole, and the storage does not answer
│   ├── StorageAccessError        credentials, permissions or address are wrong
│   └── UploadError               an object did not arrive whole
├── CheckpointError
│   ├── CorruptCheckpointError    bytes differ from what the commit says
│   ├── StructureMismatchError    the checkpoint is of another model
│   ├── StagingFullError          no room for a staging slot
│   ├── DurableAgeError           the newest durable checkpoint is older than the user allows
│   └── FencedError               the caller belongs to an attempt that was replaced
├── DataError
│   ├── EmptyDatasetError         nothing to train on
│   ├── DatasetMismatchError      the cursor belongs to another dataset or order
│   ├── CacheFullError            the live set does not fit the node's cache
│   ├── ShardReadError            a data shard cannot be fetched or decoded
│   └── ShardTransformError       the user's transform_shard failed, or made another number of rows
└── RunError
    ├── RunInUseError             another driver holds the run name
    ├── WorkersUnavailableError   the cluster has had no room for the workers for too long
    ├── DrainedError              the attempt saved and left, since a node or process of it is about to go
    └── CrashLoopError            failures without progress used up their budget

Each message says what happened, with the numbers, what still works and what to change. Errors cross
processes (Ray pickles them), so each keeps its arguments in `args`.
"""

from __future__ import annotations


class GoodputError(Exception):
    """Base of every error raised by ray_goodput."""


class ConfigError(GoodputError, ValueError):
    """An argument or environment variable makes no sense."""


class SessionError(GoodputError, RuntimeError):
    """An API was called outside a worker, or in the wrong order."""


class StorageError(GoodputError):
    """An object store or a disk refused or failed an operation."""


class ObjectNotFoundError(StorageError):
    """The object is not there."""


class ObjectChangedError(StorageError):
    """The object's etag, version or size is not the one that was pinned."""


class NoCopyLeftError(StorageError):
    """No node of the run has a whole copy of the object, and the storage, which may have one, does not answer."""


class StorageAccessError(StorageError):
    """Credentials, permissions or the address are wrong; retrying cannot help."""


class UploadError(StorageError):
    """An object did not arrive whole; nothing is left under its final name."""


class CheckpointError(GoodputError):
    """Something is wrong with a checkpoint."""


class CorruptCheckpointError(CheckpointError):
    """Bytes read differ from what the commit record says."""


class StructureMismatchError(CheckpointError):
    """Keys, shapes or dtypes of the checkpoint differ from the live state."""


class StagingFullError(CheckpointError):
    """There is no room for a staging slot."""


class DurableAgeError(CheckpointError):
    """The newest durable checkpoint is older than `max_durable_age`, and the run was to stop then."""


class FencedError(CheckpointError):
    """The caller belongs to an attempt that has been replaced."""


class DataError(GoodputError):
    """Something is wrong with the training data."""


class EmptyDatasetError(DataError):
    """The dataset is missing, has no data shards, or no rows."""


class DatasetMismatchError(DataError):
    """A cursor belongs to another dataset, seed, lane or window setting."""


class CacheFullError(DataError):
    """The data shards needed at once do not fit the node's cache."""


class ShardTransformError(DataError):
    """The user's `transform_shard` raised, or its result is not what it should be; trying again cannot help."""


class ShardReadError(DataError):
    """A data shard cannot be fetched or decoded."""


class RunError(GoodputError):
    """A run as a whole cannot start or go on."""


class RunInUseError(RunError):
    """Another living driver holds the run name."""


class WorkersUnavailableError(RunError):
    """The cluster has had no room for the workers that the run needs for longer than it may wait."""


class DrainedError(RunError):
    """The attempt has saved and left, since a node or a process of it is about to go: the run goes on in another one.

    ranks: the world ranks that are about to go.
    """

    def __init__(self, message: str = "", ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message, ranks)
        self.ranks = tuple(ranks)

    def __str__(self) -> str:
        return str(self.args[0])


class CrashLoopError(RunError):
    """Failures without progress used up their budget."""
