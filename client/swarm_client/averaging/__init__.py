"""The exact gradient all-reduce among the replicas of one stage (design: the life of a step).

plan        who reduces what; pure
frames      what crosses the wire; pure
codec       how a piece of the vector becomes bytes; pure
carrier     what the algorithm needs from a network, and the waiting room for early streams
link        one stream of a round
reduce      the algorithm itself, the same under trio and asyncio
memory_carrier, libp2p_carrier, hivemind_carrier    the networks
protocol, hivemind_worker, p2pd, hivemind_door      the process that imports hivemind
supervisor  that process as the daemon sees it
"""
