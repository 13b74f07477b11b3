"""What several tests share: programs, worlds, networks and servers for tests to drive.

attack       attackers and their victim, as processes
averaging    a group of members averaging in memory
coordinator  a coordinator in process or as a program, PostgreSQL, a browser
installers   a checkout, a home and a throwaway system for the installers
network      libp2p nodes in one process
network_lab  hosts and routers as network namespaces (needs root)
runs         whole runs of real processes
swarm_world  a simulated swarm: the coordinator's core, the volunteer's rules, a network
tui          a source, keys and a screen for the terminal views
"""
