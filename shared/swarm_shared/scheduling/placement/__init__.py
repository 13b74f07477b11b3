"""Who should hold which stage: pure functions of what is known, used by both sides.

    newcomer     the stage that somebody who joins should take
    moves        whom to move to another stage while the run goes on, and why
    swarm_rule   the rule of SWARM for the same question, to compare with
    loads        what both of these look at: stages and peers as numbers
    summing      who of a stage sums how much of its gradients

The pipeline runs at its slowest stage (design: placement), so all of them work on the thinnest.
No clock, no chance, no I/O: the coordinator, its simulator and the tests run the same code.
"""

from swarm_shared.scheduling.placement.joining import covered, most_underserved_stage
from swarm_shared.scheduling.placement.loads import PeerLoad, StageLoad, stage_rates
from swarm_shared.scheduling.placement.moves import Move, MoveDecision, MovePolicy, choose_moves
from swarm_shared.scheduling.placement.reduce_shares import reduce_weights, round_seconds
from swarm_shared.scheduling.placement.swarm_rule import choose_swarm_moves

__all__ = [
    "Move",
    "MoveDecision",
    "MovePolicy",
    "PeerLoad",
    "StageLoad",
    "choose_moves",
    "choose_swarm_moves",
    "covered",
    "most_underserved_stage",
    "reduce_weights",
    "round_seconds",
    "stage_rates",
]
