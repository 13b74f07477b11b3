"""What makes work credible: transcripts, audits, and the standing of owners.

Values and pure decisions; `swarm_coordinator.core.rules.auditing` and `...rules.closing` carry them
out (docs/decisions, number 0036). The terms of both:

    cell           One microbatch in one stage of one step. It counts for the peer whose receipt of
                   it came first.
    transcript     The digests of what crossed a stage's boundaries in a cell; part of its receipt.
                   Neighbours must tell the same of their boundary; a microbatch whose transcripts
                   do not is broken, and computed again (`chains`).
    claim          What the receipt of an audited cell says: the transcript and the loss.
    owner          The key that a device is bound to, or the device itself. Votes, standing and bans
                   are an owner's.

    audit          Another owner's peer of the same stage, the auditor, computes a cell again and
                   signs a statement of what it found. A share of all cells is drawn, the more while
                   an owner is on probation, and the next cell where luck has passed an owner over.
    finding        What a statement says of the claim: agrees, differs, or withheld, when the
                   audited peer gave no tensors that fit its receipt.
    vote           A finding as one owner's. The claim is the first vote for itself; one that agrees
                   ends the audit, otherwise more auditors are asked until a majority decides.
    outcome        Passed, lost, withheld, or open: undecided if there were votes, unanswered if
                   there were none. Before that an audit with a vote against is disputed.
    hidden         An audit whose auditor takes its inputs from the peers beside the audited one,
                   which so does not learn that it is audited.
    class          Machines whose results have been equal to the bit (`arithmetic_classes`). An
                   audit within a class is judged without tolerance; to deviate is to leave it.

    whole audit    Hidden audits of all cells that a member counts in a step. Their digests must add
                   up to what it puts into the average (`whole_audits`).
    contest        Digests of a whole audit that contradict the member: others audit the contested
                   cells, which confirms one side.

    standing       An owner's passed and lost audits (`standing`). It is on probation until enough
                   have passed, and then established.
    vested         Work up to the last passed audit, which is the owner's for good. A lost audit
                   makes its work after that void in the ledger.
    verdict        The record of a lost audit, with signed evidence. The owner is expelled: its
                   cells are cleared, and it is refused for an hour, after the second one banned.
    cleared        A cell that no longer counts while its peer lives. The peer is to drop it, which
                   takes the microbatch out of its sum.
"""
