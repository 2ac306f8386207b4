"""What of a job can be refused before it waits in the queue: the checks that take milliseconds.

The driver makes all checks again, with the words of the command line; here a mistake is told to the one who
makes it. What depends on the Ray cluster's devices cannot be known yet.
"""

from __future__ import annotations

from actors.engine.support import check_supported
from actors.engine.windows import WindowSplit
from actors.job import Job
from actors.planning import emulated_plan, plan_request
from actors.text.text import check_text
from planner.cluster import Cluster
from planner.cost.plan_memory import check_memory
from planner.plan import Plan
from planner.profile.analytic import AnalyticProfile
from planner.search.diagnose import cannot_fit, may_fit


def check_feasible(job: Job) -> None:
    """UserError if the text is too short, the job's own plan cannot run, or no plan can hold its model."""
    _check_data(job)
    if isinstance(job.plan, Plan):
        plan = emulated_plan(job.plan, job.emulation)
        check_supported(plan)
        check_memory(plan)
    elif isinstance(job.cluster, Cluster):
        request = plan_request(job)
        if not may_fit(request):
            raise cannot_fit(request, profile=AnalyticProfile(request.model, request.cluster.device_types))


def _check_data(job: Job) -> None:
    """UserError if a text is too short for a sample, or what is held out of it leaves none."""
    length, share = job.training.sequence_length, job.data.held_out
    for text in job.texts():
        windows = check_text(text, sequence_length=length, vocab_size=job.model.vocab_size)
        # Packed samples are more than sizes tell.
        if isinstance(share, float) and windows is not None and not job.data.packing:
            WindowSplit(windows, share, told=text.told("the text"))
    if (held_out := job.held_out_text()) is not None:
        check_text(held_out, sequence_length=length, vocab_size=job.model.vocab_size)
