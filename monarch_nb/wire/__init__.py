"""What travels between processes: message headers, bodies, code by value, errors."""

from monarch_nb.wire.address import Address, agent_of, controller_address, host_of, parse_address, proc_address
from monarch_nb.wire.body import Encoded, Frame, MessageTooLargeError, check_size, decode, encode
from monarch_nb.wire.code import register_pickle_by_value, travels_by_value, unregister_pickle_by_value
from monarch_nb.wire.codec import current_codec
from monarch_nb.wire.display import Display, decode_display, encode_display
from monarch_nb.wire.errors import (
    ActorError,
    RemoteException,
    Story,
    decode_exception,
    encode_exception,
    format_exception,
    story_of,
    unpickle_failure,
)
from monarch_nb.wire.explain import PickleFailure, explain_unpicklable, pickle_failure
from monarch_nb.wire.folded import Folded, fold, unfold, unfold_each
from monarch_nb.wire.frames import ENGINE, At, is_mistake, without_engine
from monarch_nb.wire.handlers import Asker, Handlers, VerbTakenError
from monarch_nb.wire.header import (
    CastPlan,
    Flags,
    Header,
    Kind,
    Layout,
    Run,
    Status,
    decode_header,
    encode_header,
)
from monarch_nb.wire.hosts import forget_host_names, host_id, host_name
from monarch_nb.wire.pickler import DISPATCH_TABLE, REDUCERS
from monarch_nb.wire.pieces import Pieces
from monarch_nb.wire.plain import converted, decode_plain, json_decoder, msgpack_decoder
from monarch_nb.wire.sources import gather_sources, received_sources, register_sources
from monarch_nb.wire.tensors import without_modes
from monarch_nb.wire.texts import (
    Cut,
    Harmless,
    error_line,
    full_name,
    harmless,
    number_of,
    repr_of,
    text_of,
    type_name,
)
from monarch_nb.wire.verb import (
    REPLY,
    Done,
    Lane,
    MalformedMessageError,
    Refused,
    Verb,
    decode_refusal,
    encode_body,
)
from monarch_nb.wire.words import counted, kind_of, with_article

__all__ = [
    "DISPATCH_TABLE",
    "ENGINE",
    "REDUCERS",
    "REPLY",
    "ActorError",
    "Address",
    "Asker",
    "At",
    "CastPlan",
    "Cut",
    "Display",
    "Done",
    "Encoded",
    "Flags",
    "Folded",
    "Frame",
    "Handlers",
    "Harmless",
    "Header",
    "Kind",
    "Lane",
    "Layout",
    "MalformedMessageError",
    "MessageTooLargeError",
    "PickleFailure",
    "Pieces",
    "Refused",
    "RemoteException",
    "Run",
    "Status",
    "Story",
    "Verb",
    "VerbTakenError",
    "agent_of",
    "check_size",
    "controller_address",
    "converted",
    "counted",
    "current_codec",
    "decode",
    "decode_display",
    "decode_exception",
    "decode_header",
    "decode_plain",
    "decode_refusal",
    "encode",
    "encode_body",
    "encode_display",
    "encode_exception",
    "encode_header",
    "error_line",
    "explain_unpicklable",
    "fold",
    "forget_host_names",
    "format_exception",
    "full_name",
    "gather_sources",
    "harmless",
    "host_id",
    "host_name",
    "host_of",
    "is_mistake",
    "json_decoder",
    "kind_of",
    "msgpack_decoder",
    "number_of",
    "parse_address",
    "pickle_failure",
    "proc_address",
    "received_sources",
    "register_pickle_by_value",
    "register_sources",
    "repr_of",
    "story_of",
    "text_of",
    "travels_by_value",
    "type_name",
    "unfold",
    "unfold_each",
    "unpickle_failure",
    "unregister_pickle_by_value",
    "with_article",
    "without_engine",
    "without_modes",
]
