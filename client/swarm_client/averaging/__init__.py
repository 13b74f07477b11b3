"""The exact gradient all-reduce among the replicas of one stage.

all_reduce  the algorithm, the same under trio and asyncio; routes and codecs
protocol    the messages between the daemon and the averaging worker
handle      the daemon's side (trio): supervisor, directory requests, stream bridge
worker      the child (asyncio): hivemind, p2pd, the DHT
"""
