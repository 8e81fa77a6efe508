"""An engine on a fake clock with one table, as the tests of progress/ use it."""

from fakes import FakeClock, FakeDriver

from trtllm_pp_progress.progress.engine import Engine
from trtllm_pp_progress.progress.log import Log
from trtllm_pp_progress.progress.slot_wait import wait_for_slot
from trtllm_pp_progress.settings.core import Settings

SETTINGS = Settings(max_polls=10, drain_deadline_s=5, stall_warning_s=2, backoff_max_us=50_000)
SLOTS = 1024
RANK, PEER = 2, 3


class Rig:
    """An engine with one table, its clock and driver, and an upstream wait that notes its calls.

    Posts are left to whoever drives; `by_relay`: the tests' thread is the relay's, which drives what it posts.
    """

    def __init__(self, settings=SETTINGS, slots=4, by_relay=False, driver=None):
        self.clock, self.driver = FakeClock(), driver or FakeDriver()
        log = Log(lambda: (RANK, PEER))
        self.engine = Engine(settings, log, self.driver, clock=self.clock, pause=self.clock.pause)
        if by_relay:
            self.engine.relay.comes_by()
        self.table = self.engine.table("send_handles", [None] * slots)
        self.sends = self.table.sends
        self.counters = self.sends.counters
        self.upstream_waits = []

    def post(self, handle, slot=0):
        """Write a handle as upstream does, and return it."""
        self.table[slot] = handle
        return handle

    def upstream_wait(self, slot=0):
        """Wait as upstream does."""
        self.upstream_waits.append(slot)
        if self.table[slot] is not None:
            self.table[slot].wait()
            self.table[slot] = None

    def wait(self, slot=0):
        """Wait as the patched executor does."""
        wait_for_slot(self.engine, self.table, slot, lambda: self.upstream_wait(slot))
