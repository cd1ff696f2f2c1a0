"""Engine messages to and from host agents. Their bodies are in `host.protocol`."""

from monarch_nb.host import protocol as p
from monarch_nb.wire import Done, Lane, Verb

# To an agent.
SPAWN = Verb("agent.spawn", p.SpawnProcs, p.SpawnReply, doc="starts ranks of a proc mesh on its host")
SPARES = Verb("agent.spares", p.KeepSpares, doc="processes that are started ahead for a mesh")
WATCH = Verb(
    "agent.watch", p.Addresses, Done, doc="notifies the sender when procs end, at once for those that have ended"
)
STOP = Verb("agent.stop", p.Stop, p.StopReply, doc="stops procs; answered when all are gone")
KILL = Verb("agent.kill", p.Kill, Done, doc="sends a signal to procs")
STATUS = Verb("agent.status", Done, p.HostState, doc="who the agent is, and which procs it has")
SAMPLES = Verb("agent.samples", p.AskSamples, p.ProcSamples, doc="state and processor time of procs, be they silent")
SHUTDOWN = Verb("agent.shutdown", p.Shutdown, p.StopReply, doc="stops every proc, then the agent")
HOSTS = Verb("agent.hosts", p.Hosts, Done, doc="routes to other hosts")
LOST = Verb("agent.lost", p.HostsLost, Done, doc="hosts are gone, with all that ran there")
LEAVE = Verb("agent.leave", Done, Done, doc="the sender goes: its procs are stopped")
INTRODUCE = Verb(
    "agent.introduce", p.Introduce, p.IntroduceReply, doc="makes the agent a gateway to the host at an endpoint"
)
LEASE = Verb("agent.lease", p.OwnerLease, Done, doc="the owner lives; its procs do for so long")
BEAT = Verb("agent.beat", Done, doc="the sender lives: it renews its lease")
HOLD = Verb("agent.hold", p.Hold, Done, doc="a mesh of the sender that may outlive it, and what it takes to come back")
DETACH = Verb("agent.detach", p.Detach, Done, doc="the sender leaves a mesh, which keeps running for its lease")
ATTACH = Verb("agent.attach", p.Attach, p.AttachReply, doc="the sender attaches a mesh that was left, or takes it over")
CASTS = Verb(
    "relays.casts", p.AskCasts, p.CastStates, lane=Lane.DATA, doc="what has become of casts that a relay may have lost?"
)
KEY = Verb("agent.key", p.KeyChange, p.KeyChanged, doc="one step in the change of the job's key")
DROP = Verb("agent.drop", p.DropMesh, Done, doc="ranks that the sender gave up when it lost the host are stopped")

# From an agent, to a proc or a controller.
PROC_STARTED = Verb("proc.started", p.StartedProc, doc="a process exists")
PROC_EXITED = Verb("proc.exited", p.Exited, doc="a process has ended, or was never started")
PROC_STOP = Verb("proc.stop", p.ProcStop, doc="the proc should end by itself")
PROC_PING = Verb("proc.ping", Done, Done, doc="does the owner of procs still live?")
PROC_UNRESPONSIVE = Verb("proc.unresponsive", p.Responsiveness, doc="living procs of the receiver do not answer")
PROC_RESPONSIVE = Verb("proc.responsive", p.Responsiveness, doc="they answer again")
NEW_OWNER = Verb("proc.owner", p.NewOwner, p.Welcome, doc="meshes have another owner, or none for a time")
STOLEN = Verb("controller.stolen", p.Stolen, doc="another controller has taken a mesh over")
HOST_LOST = Verb("host.lost", p.HostsLost, doc="hosts are gone, with all that ran there")
RELAY_CHANGED = Verb("relays.changed", p.RelayChanged, doc="another process passes on what goes to other hosts")
HOST_CUT = Verb("host.cut", p.HostsLost, doc="a gateway's connection to hosts behind it is gone")
HOST_NOTICE = Verb(
    "host.notice", p.PreemptionNotice, doc="the sender's host is about to be taken away, or stays after all"
)
IDENTIFY = Verb("controller.who", p.HostState, p.IdentifyReply, doc="may this host join, and which controller is it?")
HOST_JOINS = Verb("host.joins", p.HostState, doc="a host that dialled has joined")
