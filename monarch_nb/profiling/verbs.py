"""Engine messages between whoever profiles a mesh and the processes of that mesh."""

from monarch_nb.profiling import messages as m
from monarch_nb.wire import Verb

BEGIN = Verb("profiling.begin", m.Begin, m.Began, doc="samples the stacks of an actor, or of the whole process")
END = Verb("profiling.end", m.StopSampling, m.Samples, doc="samples no longer, and gives the rest")
SAMPLES = Verb("profiling.samples", m.Samples, m.SamplesReply, doc="what was sampled since the last of these")
RECORD = Verb(
    "profiling.record", m.BeginRecording, m.Began, doc="records the calls of an actor, or of the whole process"
)
END_RECORD = Verb("profiling.end_record", m.StopRecording, m.Recorded, doc="records no longer, and gives the rest")
RECORDED = Verb("profiling.recorded", m.Recorded, m.SamplesReply, doc="what was recorded since the last of these")
