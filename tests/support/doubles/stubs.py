"""What upstream's own unit tests build: executors made without __init__, with mocks and a handful of attributes."""

import threading
from unittest.mock import MagicMock

TABLES = ("send_handles", "send_schedule_handles", "send_expected_batch_num_handles")


def cleanup_stub(cls, **handles):
    """Return an executor of one slot that has what its cleanup touches; `handles` replace a mock by table."""
    stub = object.__new__(cls)
    stub.response_cv, stub.shutdown_event, stub.is_shutdown = threading.Condition(), threading.Event(), False
    stub.num_micro_batches = 1
    for name in TABLES:
        setattr(stub, name, [handles.get(name) or MagicMock()])
    return stub


def empty_stub(cls):
    """Return an executor without any attribute."""
    return object.__new__(cls)
