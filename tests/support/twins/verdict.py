"""Whether the patched twin was worse off than the other one, and in what."""

LATER_S = 0.5  # a delivery that is so much later is worse
NOISE_S = 2.0  # of a machine whose ranks share cores: an end that is so much longer is worse
VICTIM = -9


def worse(cell, unpatched, patched, noise_s=NOISE_S):
    """List what was worse with the patch; `unpatched` and `patched` are what came of each twin, once or several times.

    Upstream's own end is a race in some cells, where threads are in MPI while it is finalized: what any rank but the
    receiver has done in an unpatched twin is no worse in a patched one. What only some patched ones do is worse all the
    same, unless it is a matter of time: that has to be so in most of them.
    """
    found = {}
    for outcome in patched:
        for what in {*_delivery(unpatched, outcome), *_ends(unpatched, outcome)}:
            found[what] = len(patched)
        for what in _times(cell, unpatched, outcome, noise_s):
            found[what] = found.get(what, 0) + 1
    return sorted(what for what, times in found.items() if 2 * times > len(patched))


def _delivery(unpatched, patched):
    """List what was not delivered, or wrong."""
    if all(outcome.delivered for outcome in unpatched) and not patched.delivered:
        yield "not delivered"
    for number, rank in enumerate(patched.ranks):
        if rank.tokens not in [outcome.ranks[number].tokens for outcome in unpatched]:
            yield f"rank {number} has other tokens"


def _ends(unpatched, patched):
    """List what ended in another way: hung, with another code, or with complaints."""
    if any(outcome.aborted for outcome in unpatched):
        return  # the job is ended by MPI or its launcher, whose signal each rank meets somewhere else
    if patched.aborted and not any(outcome.hung for outcome in unpatched):
        yield "the job is aborted"
    if patched.aborted:
        return
    for number, after in enumerate(patched.ranks):
        if any(outcome.ranks[number].hung for outcome in unpatched):
            continue
        before = [rank for outcome in unpatched for rank in outcome.ranks if rank.role == after.role]
        if after.hung:
            yield f"{after.role} hangs"
        elif after.code not in (codes := {rank.code for rank in before}):
            yield f"{after.role} ends with {after.code}, not {' or '.join(map(str, sorted(codes)))}"
        for complaint in after.complaints:
            if not any(complaint in rank.complaints for rank in before):
                yield f"{after.role} complains: {complaint}"


def _times(cell, unpatched, patched, noise_s):
    """List what took longer: a delivery, the shutdown of an executor, the end of a process."""
    latest = [outcome.ranks[0].latency_s for outcome in unpatched]
    latency = patched.ranks[0].latency_s
    if latency is not None and None not in latest and latency > max(latest) + LATER_S:
        yield "delivered later"
    allowed = noise_s + cell.held_s + (cell.deadline_s if cell.peer_gone else 0.0)
    for number, after in enumerate(patched.ranks):
        before = [outcome.ranks[number] for outcome in unpatched]
        closed, ended = [rank.closed_s for rank in before], [rank.end_s for rank in before]
        if None not in closed and (after.closed_s is None or after.closed_s > max(closed) + allowed):
            yield f"rank {number} takes longer to shut down"
        if after.end_s is not None and None not in ended and after.end_s > max(ended) + allowed:
            yield f"rank {number} takes longer to end"


def told(outcome):
    """Say in a few words what came of a twin: the delivery, then for each rank how long its end took, and its code."""
    words = []
    if (latency := outcome.ranks[0].latency_s) is not None:
        words.append(f"{'right' if outcome.delivered else 'WRONG'} in {latency:.2f} s")
    elif "receives" in outcome.ranks[0].events:
        words.append("never received")
    words.append(" | ".join(_ending(rank) for rank in outcome.ranks))
    if outcome.abandoned:
        words.append(f"{outcome.abandoned} given up")
    return "; ".join(words)


def _ending(rank):
    if rank.hung:
        return "hangs"
    return "ended by the launcher" if rank.code is None else f"{rank.end_s or 0:.1f} s: {rank.code}"
