"""The exact gradient all-reduce among the replicas of one stage (design: the life of a step).

plan        who reduces what; pure
frames      what crosses the wire; pure
codec       how a piece of the vector becomes bytes; pure
carrier     what the algorithm needs from a network
waiting_room    streams that come before their round is known, and who is let in
link        one stream of a round
reduce      the algorithm itself, the same under trio and asyncio

routes, opening     which way a stream goes, and what is remembered of ways that failed
memory_carrier, libp2p_carrier, hivemind_carrier    the networks
bridge, bridge_messages, host_streams, socket_channel
                    the host's streams on their way to and from the averaging worker

protocol, daemon_link, hivemind_worker, p2pd, location, addresses, hivemind_door
                    the process that imports hivemind
directory, authorizer   hivemind's DHT, for members only
supervisor, requests, restart_policy, worker_folder, listen_port
                    that process as the daemon sees it
"""
