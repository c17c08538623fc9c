"""The floor below: the worker, its deployment's limits, and what it is still to become before it gets steps."""

import logging

from tgi.kernel.link import Peer
from tgi.kernel.presence import Limits, Status
from tgi.scheduler.adapters import Adapters
from tgi.scheduler.deployment import shortfall
from tgi.scheduler.status import ADAPTING, REFUSED, WAITING

log = logging.getLogger(__name__)


class Below:
    """One worker at a time. The first one's limits hold for the deployment's life."""

    def __init__(self) -> None:
        self.worker: Peer | None = None
        self.limits: Limits | None = None
        self.adapters = Adapters()
        self._said = WAITING  # the worker's own status

    @property
    def status(self) -> Status:
        """What tokenizers are to know of it: it is ready once it has what the worker before it had."""
        return ADAPTING if self.adapters.lacks else self._said

    def came(self, worker: Peer) -> bool:
        """A worker says hello. False: there is one already."""
        if self.worker is not None:
            log.error("%s is ignored: %s is the worker of this scheduler", worker, self.worker)
            return False
        self.worker = worker
        return True

    def hears(self, status: Status) -> None:
        """The worker says how it is."""
        if status.ready and status.limits is not None and not self.status.ready:
            if self.limits is None:
                self.limits = status.limits
            elif fault := shortfall(self.limits, status.limits):
                log.error(
                    "The restarted worker does not meet this deployment's limits: %s. Free the memory that it lacks, "
                    "or restart the whole server with smaller limits.",
                    fault,
                )
                status = REFUSED
        self._said = status
        if status.ready:
            self.adapters.told(status.adapters)

    def gone(self) -> None:
        """The worker is gone."""
        self.worker = None
        self._said = WAITING
        self.adapters.worker_gone()
