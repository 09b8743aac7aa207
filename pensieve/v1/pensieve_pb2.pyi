import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import field_mask_pb2 as _field_mask_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefixSharing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREFIX_SHARING_UNSPECIFIED: _ClassVar[PrefixSharing]
    PREFIX_SHARING_TENANT: _ClassVar[PrefixSharing]
    PREFIX_SHARING_NONE: _ClassVar[PrefixSharing]

class OverflowPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OVERFLOW_POLICY_UNSPECIFIED: _ClassVar[OverflowPolicy]
    OVERFLOW_POLICY_REJECT: _ClassVar[OverflowPolicy]
    OVERFLOW_POLICY_DROP_OLDEST_TURNS: _ClassVar[OverflowPolicy]

class SessionView(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_VIEW_UNSPECIFIED: _ClassVar[SessionView]
    SESSION_VIEW_BASIC: _ClassVar[SessionView]
    SESSION_VIEW_FULL: _ClassVar[SessionView]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_SYSTEM: _ClassVar[Role]
    ROLE_USER: _ClassVar[Role]
    ROLE_ASSISTANT: _ClassVar[Role]
    ROLE_TOOL: _ClassVar[Role]

class CandidateChoice(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CANDIDATE_CHOICE_UNSPECIFIED: _ClassVar[CandidateChoice]
    CANDIDATE_CHOICE_FIRST: _ClassVar[CandidateChoice]
    CANDIDATE_CHOICE_BEST_LOGPROB: _ClassVar[CandidateChoice]

class DisconnectPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DISCONNECT_POLICY_UNSPECIFIED: _ClassVar[DisconnectPolicy]
    DISCONNECT_POLICY_CANCEL: _ClassVar[DisconnectPolicy]
    DISCONNECT_POLICY_FINISH: _ClassVar[DisconnectPolicy]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_STOP_SEQUENCE: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CONTEXT_FULL: _ClassVar[FinishReason]
    FINISH_REASON_TIME_LIMIT: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
PREFIX_SHARING_UNSPECIFIED: PrefixSharing
PREFIX_SHARING_TENANT: PrefixSharing
PREFIX_SHARING_NONE: PrefixSharing
OVERFLOW_POLICY_UNSPECIFIED: OverflowPolicy
OVERFLOW_POLICY_REJECT: OverflowPolicy
OVERFLOW_POLICY_DROP_OLDEST_TURNS: OverflowPolicy
SESSION_VIEW_UNSPECIFIED: SessionView
SESSION_VIEW_BASIC: SessionView
SESSION_VIEW_FULL: SessionView
ROLE_UNSPECIFIED: Role
ROLE_SYSTEM: Role
ROLE_USER: Role
ROLE_ASSISTANT: Role
ROLE_TOOL: Role
CANDIDATE_CHOICE_UNSPECIFIED: CandidateChoice
CANDIDATE_CHOICE_FIRST: CandidateChoice
CANDIDATE_CHOICE_BEST_LOGPROB: CandidateChoice
DISCONNECT_POLICY_UNSPECIFIED: DisconnectPolicy
DISCONNECT_POLICY_CANCEL: DisconnectPolicy
DISCONNECT_POLICY_FINISH: DisconnectPolicy
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_STOP_SEQUENCE: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CONTEXT_FULL: FinishReason
FINISH_REASON_TIME_LIMIT: FinishReason
FINISH_REASON_CANCELLED: FinishReason

class Session(_message.Message):
    __slots__ = ("name", "state", "revision", "item_count", "context_tokens", "context_limit", "config", "labels", "create_time", "update_time", "expire_time", "forked_from", "forked_from_item", "active_turn", "residency")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Session.State]
        STATE_ACTIVE: _ClassVar[Session.State]
        STATE_DAMAGED: _ClassVar[Session.State]
        STATE_DELETED: _ClassVar[Session.State]
    STATE_UNSPECIFIED: Session.State
    STATE_ACTIVE: Session.State
    STATE_DAMAGED: Session.State
    STATE_DELETED: Session.State
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ITEM_COUNT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    UPDATE_TIME_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    FORKED_FROM_FIELD_NUMBER: _ClassVar[int]
    FORKED_FROM_ITEM_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_TURN_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: Session.State
    revision: int
    item_count: int
    context_tokens: int
    context_limit: int
    config: SessionConfig
    labels: _containers.ScalarMap[str, str]
    create_time: _timestamp_pb2.Timestamp
    update_time: _timestamp_pb2.Timestamp
    expire_time: _timestamp_pb2.Timestamp
    forked_from: str
    forked_from_item: int
    active_turn: ActiveTurn
    residency: CacheResidency
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[Session.State, str]] = ..., revision: _Optional[int] = ..., item_count: _Optional[int] = ..., context_tokens: _Optional[int] = ..., context_limit: _Optional[int] = ..., config: _Optional[_Union[SessionConfig, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., update_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., forked_from: _Optional[str] = ..., forked_from_item: _Optional[int] = ..., active_turn: _Optional[_Union[ActiveTurn, _Mapping]] = ..., residency: _Optional[_Union[CacheResidency, _Mapping]] = ...) -> None: ...

class ActiveTurn(_message.Message):
    __slots__ = ("request_id", "start_time")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    start_time: _timestamp_pb2.Timestamp
    def __init__(self, request_id: _Optional[str] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class CacheResidency(_message.Message):
    __slots__ = ("replica", "as_of_revision", "gpu_tokens", "host_tokens", "dropped_tokens", "as_of_time")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    AS_OF_REVISION_FIELD_NUMBER: _ClassVar[int]
    GPU_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AS_OF_TIME_FIELD_NUMBER: _ClassVar[int]
    replica: str
    as_of_revision: int
    gpu_tokens: int
    host_tokens: int
    dropped_tokens: int
    as_of_time: _timestamp_pb2.Timestamp
    def __init__(self, replica: _Optional[str] = ..., as_of_revision: _Optional[int] = ..., gpu_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., dropped_tokens: _Optional[int] = ..., as_of_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class SessionConfig(_message.Message):
    __slots__ = ("model", "system_prompt", "default_sampling", "ttl", "overflow_policy", "prefix_sharing", "tools_json", "subject", "summary", "compact_at", "keep_turns")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_PROMPT_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_POLICY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SHARING_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    COMPACT_AT_FIELD_NUMBER: _ClassVar[int]
    KEEP_TURNS_FIELD_NUMBER: _ClassVar[int]
    model: str
    system_prompt: str
    default_sampling: SamplingParams
    ttl: _duration_pb2.Duration
    overflow_policy: OverflowPolicy
    prefix_sharing: PrefixSharing
    tools_json: str
    subject: str
    summary: str
    compact_at: int
    keep_turns: int
    def __init__(self, model: _Optional[str] = ..., system_prompt: _Optional[str] = ..., default_sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., overflow_policy: _Optional[_Union[OverflowPolicy, str]] = ..., prefix_sharing: _Optional[_Union[PrefixSharing, str]] = ..., tools_json: _Optional[str] = ..., subject: _Optional[str] = ..., summary: _Optional[str] = ..., compact_at: _Optional[int] = ..., keep_turns: _Optional[int] = ...) -> None: ...

class CreateSessionRequest(_message.Message):
    __slots__ = ("request_id", "session_id", "config", "labels", "initial_items", "followed_by")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    INITIAL_ITEMS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_BY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    session_id: str
    config: SessionConfig
    labels: _containers.ScalarMap[str, str]
    initial_items: _containers.RepeatedCompositeFieldContainer[InputItem]
    followed_by: _containers.RepeatedScalarFieldContainer[Role]
    def __init__(self, request_id: _Optional[str] = ..., session_id: _Optional[str] = ..., config: _Optional[_Union[SessionConfig, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., initial_items: _Optional[_Iterable[_Union[InputItem, _Mapping]]] = ..., followed_by: _Optional[_Iterable[_Union[Role, str]]] = ...) -> None: ...

class CreateSessionResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("name", "view")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    name: str
    view: SessionView
    def __init__(self, name: _Optional[str] = ..., view: _Optional[_Union[SessionView, str]] = ...) -> None: ...

class GetSessionResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "label_selector")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LABEL_SELECTOR_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    label_selector: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., label_selector: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    next_page_token: str
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class UpdateSessionRequest(_message.Message):
    __slots__ = ("name", "session", "update_mask", "expected_revision", "rebind")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REVISION_FIELD_NUMBER: _ClassVar[int]
    REBIND_FIELD_NUMBER: _ClassVar[int]
    name: str
    session: Session
    update_mask: _field_mask_pb2.FieldMask
    expected_revision: int
    rebind: bool
    def __init__(self, name: _Optional[str] = ..., session: _Optional[_Union[Session, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ..., expected_revision: _Optional[int] = ..., rebind: bool = ...) -> None: ...

class UpdateSessionResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class DeleteSessionRequest(_message.Message):
    __slots__ = ("name", "expected_revision", "allow_missing", "unused_only", "keep_cached")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REVISION_FIELD_NUMBER: _ClassVar[int]
    ALLOW_MISSING_FIELD_NUMBER: _ClassVar[int]
    UNUSED_ONLY_FIELD_NUMBER: _ClassVar[int]
    KEEP_CACHED_FIELD_NUMBER: _ClassVar[int]
    name: str
    expected_revision: int
    allow_missing: bool
    unused_only: bool
    keep_cached: bool
    def __init__(self, name: _Optional[str] = ..., expected_revision: _Optional[int] = ..., allow_missing: bool = ..., unused_only: bool = ..., keep_cached: bool = ...) -> None: ...

class DeleteSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CompactSessionRequest(_message.Message):
    __slots__ = ("name", "request_id", "keep_turns", "expected_revision", "instruction", "max_summary_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KEEP_TURNS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REVISION_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    MAX_SUMMARY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    request_id: str
    keep_turns: int
    expected_revision: int
    instruction: str
    max_summary_tokens: int
    def __init__(self, name: _Optional[str] = ..., request_id: _Optional[str] = ..., keep_turns: _Optional[int] = ..., expected_revision: _Optional[int] = ..., instruction: _Optional[str] = ..., max_summary_tokens: _Optional[int] = ...) -> None: ...

class CompactSessionResponse(_message.Message):
    __slots__ = ("session", "branch", "summary", "usage")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    session: Session
    branch: str
    summary: str
    usage: Usage
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., branch: _Optional[str] = ..., summary: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class EraseSubjectRequest(_message.Message):
    __slots__ = ("subject",)
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    subject: str
    def __init__(self, subject: _Optional[str] = ...) -> None: ...

class EraseSubjectResponse(_message.Message):
    __slots__ = ("session", "completed")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    session: ErasedSession
    completed: SubjectErased
    def __init__(self, session: _Optional[_Union[ErasedSession, _Mapping]] = ..., completed: _Optional[_Union[SubjectErased, _Mapping]] = ...) -> None: ...

class ErasedSession(_message.Message):
    __slots__ = ("name", "forked_from", "revision", "turns", "items", "tokens", "device_tokens", "host_tokens", "dropped_tokens", "damaged")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FORKED_FROM_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    name: str
    forked_from: str
    revision: int
    turns: int
    items: int
    tokens: int
    device_tokens: int
    host_tokens: int
    dropped_tokens: int
    damaged: bool
    def __init__(self, name: _Optional[str] = ..., forked_from: _Optional[str] = ..., revision: _Optional[int] = ..., turns: _Optional[int] = ..., items: _Optional[int] = ..., tokens: _Optional[int] = ..., device_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., dropped_tokens: _Optional[int] = ..., damaged: bool = ...) -> None: ...

class SubjectErased(_message.Message):
    __slots__ = ("sessions", "forks", "turns", "items", "tokens", "replica", "undecided", "remnants")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    FORKS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    UNDECIDED_FIELD_NUMBER: _ClassVar[int]
    REMNANTS_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    forks: int
    turns: int
    items: int
    tokens: int
    replica: str
    undecided: _containers.RepeatedScalarFieldContainer[str]
    remnants: str
    def __init__(self, sessions: _Optional[int] = ..., forks: _Optional[int] = ..., turns: _Optional[int] = ..., items: _Optional[int] = ..., tokens: _Optional[int] = ..., replica: _Optional[str] = ..., undecided: _Optional[_Iterable[str]] = ..., remnants: _Optional[str] = ...) -> None: ...

class ExportSessionRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ExportSessionResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ExportSubjectRequest(_message.Message):
    __slots__ = ("subject",)
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    subject: str
    def __init__(self, subject: _Optional[str] = ...) -> None: ...

class ExportSubjectResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ImportSessionRequest(_message.Message):
    __slots__ = ("data", "session_id", "new_id")
    DATA_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NEW_ID_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    session_id: str
    new_id: bool
    def __init__(self, data: _Optional[bytes] = ..., session_id: _Optional[str] = ..., new_id: bool = ...) -> None: ...

class ImportSessionResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class ForkSessionRequest(_message.Message):
    __slots__ = ("name", "request_id", "item", "session_id", "expected_revision", "candidate", "ttl")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REVISION_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    name: str
    request_id: str
    item: int
    session_id: str
    expected_revision: int
    candidate: int
    ttl: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., request_id: _Optional[str] = ..., item: _Optional[int] = ..., session_id: _Optional[str] = ..., expected_revision: _Optional[int] = ..., candidate: _Optional[int] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ForkSessionResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class RewindSessionRequest(_message.Message):
    __slots__ = ("name", "request_id", "item", "expected_revision", "erase")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REVISION_FIELD_NUMBER: _ClassVar[int]
    ERASE_FIELD_NUMBER: _ClassVar[int]
    name: str
    request_id: str
    item: int
    expected_revision: int
    erase: bool
    def __init__(self, name: _Optional[str] = ..., request_id: _Optional[str] = ..., item: _Optional[int] = ..., expected_revision: _Optional[int] = ..., erase: bool = ...) -> None: ...

class RewindSessionResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class InputItem(_message.Message):
    __slots__ = ("role", "text", "tokens", "raw_text", "function_calls", "call_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RAW_TEXT_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_CALLS_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    role: Role
    text: str
    tokens: TokenIds
    raw_text: str
    function_calls: _containers.RepeatedCompositeFieldContainer[FunctionCall]
    call_id: str
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., text: _Optional[str] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., raw_text: _Optional[str] = ..., function_calls: _Optional[_Iterable[_Union[FunctionCall, _Mapping]]] = ..., call_id: _Optional[str] = ...) -> None: ...

class FunctionCall(_message.Message):
    __slots__ = ("name", "arguments_json", "id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments_json: str
    id: str
    def __init__(self, name: _Optional[str] = ..., arguments_json: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class Item(_message.Message):
    __slots__ = ("item", "role", "text", "tokens", "request_id", "finish_reason", "create_time", "call_id")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    item: int
    role: Role
    text: str
    tokens: TokenIds
    request_id: str
    finish_reason: FinishReason
    create_time: _timestamp_pb2.Timestamp
    call_id: str
    def __init__(self, item: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., text: _Optional[str] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., request_id: _Optional[str] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., call_id: _Optional[str] = ...) -> None: ...

class AppendItemsRequest(_message.Message):
    __slots__ = ("name", "request_id", "items", "expected_revision", "followed_by")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REVISION_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_BY_FIELD_NUMBER: _ClassVar[int]
    name: str
    request_id: str
    items: _containers.RepeatedCompositeFieldContainer[InputItem]
    expected_revision: int
    followed_by: _containers.RepeatedScalarFieldContainer[Role]
    def __init__(self, name: _Optional[str] = ..., request_id: _Optional[str] = ..., items: _Optional[_Iterable[_Union[InputItem, _Mapping]]] = ..., expected_revision: _Optional[int] = ..., followed_by: _Optional[_Iterable[_Union[Role, str]]] = ...) -> None: ...

class AppendItemsResponse(_message.Message):
    __slots__ = ("session", "items")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    session: Session
    items: _containers.RepeatedCompositeFieldContainer[Item]
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ...) -> None: ...

class ListItemsRequest(_message.Message):
    __slots__ = ("name", "page_size", "page_token", "include_tokens", "after_item")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AFTER_ITEM_FIELD_NUMBER: _ClassVar[int]
    name: str
    page_size: int
    page_token: str
    include_tokens: bool
    after_item: int
    def __init__(self, name: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., include_tokens: bool = ..., after_item: _Optional[int] = ...) -> None: ...

class ListItemsResponse(_message.Message):
    __slots__ = ("items", "next_page_token", "revision")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Item]
    next_page_token: str
    revision: int
    def __init__(self, items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed", "max_output_tokens", "min_output_tokens", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "candidates", "beam_width", "length_penalty", "early_stopping", "candidate_choice")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_CHOICE_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int
    max_output_tokens: int
    min_output_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logit_bias: _containers.ScalarMap[int, float]
    candidates: int
    beam_width: int
    length_penalty: float
    early_stopping: bool
    candidate_choice: CandidateChoice
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., max_output_tokens: _Optional[int] = ..., min_output_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., candidates: _Optional[int] = ..., beam_width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: bool = ..., candidate_choice: _Optional[_Union[CandidateChoice, str]] = ...) -> None: ...

class OutputOptions(_message.Message):
    __slots__ = ("token_ids", "top_logprobs", "max_chunk_tokens", "max_chunk_delay", "pad_chunks")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNK_DELAY_FIELD_NUMBER: _ClassVar[int]
    PAD_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bool
    top_logprobs: int
    max_chunk_tokens: int
    max_chunk_delay: _duration_pb2.Duration
    pad_chunks: bool
    def __init__(self, token_ids: bool = ..., top_logprobs: _Optional[int] = ..., max_chunk_tokens: _Optional[int] = ..., max_chunk_delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pad_chunks: bool = ...) -> None: ...

class TurnSpec(_message.Message):
    __slots__ = ("request_id", "input", "expected_revision", "replace_after_item", "sampling", "output", "max_duration", "priority", "hints", "known_revision", "annotations", "mark", "calls", "system_prompt", "tools_json", "format", "prediction")
    class AnnotationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REVISION_FIELD_NUMBER: _ClassVar[int]
    REPLACE_AFTER_ITEM_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    MAX_DURATION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_REVISION_FIELD_NUMBER: _ClassVar[int]
    ANNOTATIONS_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    input: _containers.RepeatedCompositeFieldContainer[InputItem]
    expected_revision: int
    replace_after_item: int
    sampling: SamplingParams
    output: OutputOptions
    max_duration: _duration_pb2.Duration
    priority: int
    hints: TurnHints
    known_revision: int
    annotations: _containers.ScalarMap[str, str]
    mark: str
    calls: CallBounds
    system_prompt: str
    tools_json: str
    format: AnswerFormat
    prediction: str
    def __init__(self, request_id: _Optional[str] = ..., input: _Optional[_Iterable[_Union[InputItem, _Mapping]]] = ..., expected_revision: _Optional[int] = ..., replace_after_item: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., output: _Optional[_Union[OutputOptions, _Mapping]] = ..., max_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ..., hints: _Optional[_Union[TurnHints, _Mapping]] = ..., known_revision: _Optional[int] = ..., annotations: _Optional[_Mapping[str, str]] = ..., mark: _Optional[str] = ..., calls: _Optional[_Union[CallBounds, _Mapping]] = ..., system_prompt: _Optional[str] = ..., tools_json: _Optional[str] = ..., format: _Optional[_Union[AnswerFormat, _Mapping]] = ..., prediction: _Optional[str] = ...) -> None: ...

class AnswerFormat(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "lark", "choice")
    class JsonObject(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Choice(_message.Message):
        __slots__ = ("texts",)
        TEXTS_FIELD_NUMBER: _ClassVar[int]
        texts: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: AnswerFormat.JsonObject
    regex: str
    lark: str
    choice: AnswerFormat.Choice
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[_Union[AnswerFormat.JsonObject, _Mapping]] = ..., regex: _Optional[str] = ..., lark: _Optional[str] = ..., choice: _Optional[_Union[AnswerFormat.Choice, _Mapping]] = ...) -> None: ...

class CallBounds(_message.Message):
    __slots__ = ("begin_with", "one", "allowed", "strict", "none")
    BEGIN_WITH_FIELD_NUMBER: _ClassVar[int]
    ONE_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    NONE_FIELD_NUMBER: _ClassVar[int]
    begin_with: str
    one: bool
    allowed: _containers.RepeatedScalarFieldContainer[str]
    strict: _containers.RepeatedScalarFieldContainer[str]
    none: bool
    def __init__(self, begin_with: _Optional[str] = ..., one: bool = ..., allowed: _Optional[_Iterable[str]] = ..., strict: _Optional[_Iterable[str]] = ..., none: bool = ...) -> None: ...

class TurnHints(_message.Message):
    __slots__ = ("next_turn_in", "importance", "session_finished")
    NEXT_TURN_IN_FIELD_NUMBER: _ClassVar[int]
    IMPORTANCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FINISHED_FIELD_NUMBER: _ClassVar[int]
    next_turn_in: _duration_pb2.Duration
    importance: float
    session_finished: bool
    def __init__(self, next_turn_in: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., importance: _Optional[float] = ..., session_finished: bool = ...) -> None: ...

class HintReceipt(_message.Message):
    __slots__ = ("next_turn_in", "importance", "session_finished", "ignored")
    NEXT_TURN_IN_FIELD_NUMBER: _ClassVar[int]
    IMPORTANCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FINISHED_FIELD_NUMBER: _ClassVar[int]
    IGNORED_FIELD_NUMBER: _ClassVar[int]
    next_turn_in: _duration_pb2.Duration
    importance: float
    session_finished: bool
    ignored: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, next_turn_in: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., importance: _Optional[float] = ..., session_finished: bool = ..., ignored: _Optional[_Iterable[str]] = ...) -> None: ...

class StreamTurnRequest(_message.Message):
    __slots__ = ("session", "turn", "on_disconnect", "resume_attempt", "resume_token_offset", "attach_only", "resume_candidate_offsets", "stream_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    ON_DISCONNECT_FIELD_NUMBER: _ClassVar[int]
    RESUME_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    ATTACH_ONLY_FIELD_NUMBER: _ClassVar[int]
    RESUME_CANDIDATE_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    session: str
    turn: TurnSpec
    on_disconnect: DisconnectPolicy
    resume_attempt: str
    resume_token_offset: int
    attach_only: bool
    resume_candidate_offsets: _containers.RepeatedScalarFieldContainer[int]
    stream_id: str
    def __init__(self, session: _Optional[str] = ..., turn: _Optional[_Union[TurnSpec, _Mapping]] = ..., on_disconnect: _Optional[_Union[DisconnectPolicy, str]] = ..., resume_attempt: _Optional[str] = ..., resume_token_offset: _Optional[int] = ..., attach_only: bool = ..., resume_candidate_offsets: _Optional[_Iterable[int]] = ..., stream_id: _Optional[str] = ...) -> None: ...

class StreamTurnResponse(_message.Message):
    __slots__ = ("accepted", "progress", "delta", "completed")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    accepted: TurnAccepted
    progress: TurnProgress
    delta: TurnDelta
    completed: Turn
    def __init__(self, accepted: _Optional[_Union[TurnAccepted, _Mapping]] = ..., progress: _Optional[_Union[TurnProgress, _Mapping]] = ..., delta: _Optional[_Union[TurnDelta, _Mapping]] = ..., completed: _Optional[_Union[Turn, _Mapping]] = ...) -> None: ...

class TurnAccepted(_message.Message):
    __slots__ = ("request_id", "base_revision", "context_tokens", "seed", "attempt", "replayed", "heartbeat_interval")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_REVISION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    base_revision: int
    context_tokens: int
    seed: int
    attempt: str
    replayed: bool
    heartbeat_interval: _duration_pb2.Duration
    def __init__(self, request_id: _Optional[str] = ..., base_revision: _Optional[int] = ..., context_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., attempt: _Optional[str] = ..., replayed: bool = ..., heartbeat_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class TurnProgress(_message.Message):
    __slots__ = ("phase", "queue_position", "tokens_done", "tokens_total")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[TurnProgress.Phase]
        PHASE_QUEUED: _ClassVar[TurnProgress.Phase]
        PHASE_RESTORING: _ClassVar[TurnProgress.Phase]
        PHASE_PREFILL: _ClassVar[TurnProgress.Phase]
        PHASE_DECODE: _ClassVar[TurnProgress.Phase]
        PHASE_COMMIT: _ClassVar[TurnProgress.Phase]
    PHASE_UNSPECIFIED: TurnProgress.Phase
    PHASE_QUEUED: TurnProgress.Phase
    PHASE_RESTORING: TurnProgress.Phase
    PHASE_PREFILL: TurnProgress.Phase
    PHASE_DECODE: TurnProgress.Phase
    PHASE_COMMIT: TurnProgress.Phase
    PHASE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DONE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    phase: TurnProgress.Phase
    queue_position: int
    tokens_done: int
    tokens_total: int
    def __init__(self, phase: _Optional[_Union[TurnProgress.Phase, str]] = ..., queue_position: _Optional[int] = ..., tokens_done: _Optional[int] = ..., tokens_total: _Optional[int] = ...) -> None: ...

class TurnDelta(_message.Message):
    __slots__ = ("token_offset", "token_count", "text", "tokens", "logprobs", "padding", "candidate")
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    token_offset: int
    token_count: int
    text: str
    tokens: TokenIds
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    padding: bytes
    candidate: int
    def __init__(self, token_offset: _Optional[int] = ..., token_count: _Optional[int] = ..., text: _Optional[str] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., padding: _Optional[bytes] = ..., candidate: _Optional[int] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "top", "piece", "name")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopToken]
    piece: bytes
    name: str
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopToken, _Mapping]]] = ..., piece: _Optional[bytes] = ..., name: _Optional[str] = ...) -> None: ...

class TopToken(_message.Message):
    __slots__ = ("token_id", "logprob", "piece", "name")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    piece: bytes
    name: str
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., piece: _Optional[bytes] = ..., name: _Optional[str] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("session", "request_id", "state", "base_revision", "revision", "input", "output", "finish_reason", "stop_sequence", "seed", "usage", "discard_reason", "hints", "candidates", "chosen_candidate", "annotations", "numerics")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Turn.State]
        STATE_RUNNING: _ClassVar[Turn.State]
        STATE_COMMITTED: _ClassVar[Turn.State]
        STATE_DISCARDED: _ClassVar[Turn.State]
    STATE_UNSPECIFIED: Turn.State
    STATE_RUNNING: Turn.State
    STATE_COMMITTED: Turn.State
    STATE_DISCARDED: Turn.State
    class AnnotationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BASE_REVISION_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    DISCARD_REASON_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    ANNOTATIONS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    session: str
    request_id: str
    state: Turn.State
    base_revision: int
    revision: int
    input: _containers.RepeatedCompositeFieldContainer[Item]
    output: Item
    finish_reason: FinishReason
    stop_sequence: str
    seed: int
    usage: Usage
    discard_reason: str
    hints: HintReceipt
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    chosen_candidate: int
    annotations: _containers.ScalarMap[str, str]
    numerics: str
    def __init__(self, session: _Optional[str] = ..., request_id: _Optional[str] = ..., state: _Optional[_Union[Turn.State, str]] = ..., base_revision: _Optional[int] = ..., revision: _Optional[int] = ..., input: _Optional[_Iterable[_Union[Item, _Mapping]]] = ..., output: _Optional[_Union[Item, _Mapping]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_sequence: _Optional[str] = ..., seed: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., discard_reason: _Optional[str] = ..., hints: _Optional[_Union[HintReceipt, _Mapping]] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., chosen_candidate: _Optional[int] = ..., annotations: _Optional[_Mapping[str, str]] = ..., numerics: _Optional[str] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("candidate", "text", "tokens", "output_tokens", "finish_reason", "stop_sequence", "seed", "mean_logprob")
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MEAN_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    candidate: int
    text: str
    tokens: TokenIds
    output_tokens: int
    finish_reason: FinishReason
    stop_sequence: str
    seed: int
    mean_logprob: float
    def __init__(self, candidate: _Optional[int] = ..., text: _Optional[str] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., output_tokens: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_sequence: _Optional[str] = ..., seed: _Optional[int] = ..., mean_logprob: _Optional[float] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("context_tokens", "new_tokens", "gpu_cached_tokens", "swapped_in_tokens", "recomputed_tokens", "output_tokens", "queue_time", "restore_time", "prefill_time", "decode_time", "drafted_tokens", "accepted_tokens")
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GPU_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_IN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    RESTORE_TIME_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TIME_FIELD_NUMBER: _ClassVar[int]
    DECODE_TIME_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    context_tokens: int
    new_tokens: int
    gpu_cached_tokens: int
    swapped_in_tokens: int
    recomputed_tokens: int
    output_tokens: int
    queue_time: _duration_pb2.Duration
    restore_time: _duration_pb2.Duration
    prefill_time: _duration_pb2.Duration
    decode_time: _duration_pb2.Duration
    drafted_tokens: int
    accepted_tokens: int
    def __init__(self, context_tokens: _Optional[int] = ..., new_tokens: _Optional[int] = ..., gpu_cached_tokens: _Optional[int] = ..., swapped_in_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., queue_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., restore_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prefill_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decode_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class RunTurnRequest(_message.Message):
    __slots__ = ("session", "turn")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    session: str
    turn: TurnSpec
    def __init__(self, session: _Optional[str] = ..., turn: _Optional[_Union[TurnSpec, _Mapping]] = ...) -> None: ...

class RunTurnResponse(_message.Message):
    __slots__ = ("turn",)
    TURN_FIELD_NUMBER: _ClassVar[int]
    turn: Turn
    def __init__(self, turn: _Optional[_Union[Turn, _Mapping]] = ...) -> None: ...

class ChooseCandidateRequest(_message.Message):
    __slots__ = ("session", "request_id", "candidate", "expected_revision")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REVISION_FIELD_NUMBER: _ClassVar[int]
    session: str
    request_id: str
    candidate: int
    expected_revision: int
    def __init__(self, session: _Optional[str] = ..., request_id: _Optional[str] = ..., candidate: _Optional[int] = ..., expected_revision: _Optional[int] = ...) -> None: ...

class ChooseCandidateResponse(_message.Message):
    __slots__ = ("turn",)
    TURN_FIELD_NUMBER: _ClassVar[int]
    turn: Turn
    def __init__(self, turn: _Optional[_Union[Turn, _Mapping]] = ...) -> None: ...

class WarmSessionRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class WarmSessionResponse(_message.Message):
    __slots__ = ("accepted", "refused", "residency")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    refused: str
    residency: CacheResidency
    def __init__(self, accepted: bool = ..., refused: _Optional[str] = ..., residency: _Optional[_Union[CacheResidency, _Mapping]] = ...) -> None: ...

class GetTurnRequest(_message.Message):
    __slots__ = ("session", "request_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session: str
    request_id: str
    def __init__(self, session: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class GetTurnResponse(_message.Message):
    __slots__ = ("turn",)
    TURN_FIELD_NUMBER: _ClassVar[int]
    turn: Turn
    def __init__(self, turn: _Optional[_Union[Turn, _Mapping]] = ...) -> None: ...

class FindTurnRequest(_message.Message):
    __slots__ = ("mark", "answer", "request_id")
    MARK_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    mark: str
    answer: str
    request_id: str
    def __init__(self, mark: _Optional[str] = ..., answer: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class FindTurnResponse(_message.Message):
    __slots__ = ("turn", "candidate")
    TURN_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    turn: Turn
    candidate: int
    def __init__(self, turn: _Optional[_Union[Turn, _Mapping]] = ..., candidate: _Optional[int] = ...) -> None: ...

class ClaimRequestIdRequest(_message.Message):
    __slots__ = ("request_id", "fingerprint", "session", "plan", "refused")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    fingerprint: str
    session: str
    plan: str
    refused: bool
    def __init__(self, request_id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., session: _Optional[str] = ..., plan: _Optional[str] = ..., refused: bool = ...) -> None: ...

class ClaimRequestIdResponse(_message.Message):
    __slots__ = ("session", "plan")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    session: str
    plan: str
    def __init__(self, session: _Optional[str] = ..., plan: _Optional[str] = ...) -> None: ...

class CancelTurnRequest(_message.Message):
    __slots__ = ("session", "request_id", "keep", "keep_output_tokens", "stream_id")
    class Keep(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KEEP_UNSPECIFIED: _ClassVar[CancelTurnRequest.Keep]
        KEEP_PARTIAL: _ClassVar[CancelTurnRequest.Keep]
        KEEP_NOTHING: _ClassVar[CancelTurnRequest.Keep]
    KEEP_UNSPECIFIED: CancelTurnRequest.Keep
    KEEP_PARTIAL: CancelTurnRequest.Keep
    KEEP_NOTHING: CancelTurnRequest.Keep
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    KEEP_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    session: str
    request_id: str
    keep: CancelTurnRequest.Keep
    keep_output_tokens: int
    stream_id: str
    def __init__(self, session: _Optional[str] = ..., request_id: _Optional[str] = ..., keep: _Optional[_Union[CancelTurnRequest.Keep, str]] = ..., keep_output_tokens: _Optional[int] = ..., stream_id: _Optional[str] = ...) -> None: ...

class CancelTurnResponse(_message.Message):
    __slots__ = ("turn",)
    TURN_FIELD_NUMBER: _ClassVar[int]
    turn: Turn
    def __init__(self, turn: _Optional[_Union[Turn, _Mapping]] = ...) -> None: ...

class CountTokensRequest(_message.Message):
    __slots__ = ("session", "input")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    session: str
    input: _containers.RepeatedCompositeFieldContainer[InputItem]
    def __init__(self, session: _Optional[str] = ..., input: _Optional[_Iterable[_Union[InputItem, _Mapping]]] = ...) -> None: ...

class CountTokensResponse(_message.Message):
    __slots__ = ("input_tokens", "context_tokens", "context_limit")
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    input_tokens: int
    context_tokens: int
    context_limit: int
    def __init__(self, input_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., context_limit: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "replica", "model", "tokenizer_sha256", "chat_template_sha256", "vocab_size", "context_limit", "limits", "features", "model_sha256")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_SHA256_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    MODEL_SHA256_FIELD_NUMBER: _ClassVar[int]
    version: str
    replica: str
    model: str
    tokenizer_sha256: str
    chat_template_sha256: str
    vocab_size: int
    context_limit: int
    limits: Limits
    features: _containers.RepeatedScalarFieldContainer[str]
    model_sha256: str
    def __init__(self, version: _Optional[str] = ..., replica: _Optional[str] = ..., model: _Optional[str] = ..., tokenizer_sha256: _Optional[str] = ..., chat_template_sha256: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_limit: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., features: _Optional[_Iterable[str]] = ..., model_sha256: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_request_bytes", "max_input_chars", "max_stop_sequences", "max_top_logprobs", "max_ttl", "request_id_retention", "disconnect_grace", "max_candidates", "max_beam_width", "max_annotations", "max_annotation_bytes")
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_INPUT_CHARS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_TTL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_RETENTION_FIELD_NUMBER: _ClassVar[int]
    DISCONNECT_GRACE_FIELD_NUMBER: _ClassVar[int]
    MAX_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    MAX_BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    MAX_ANNOTATIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_ANNOTATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_request_bytes: int
    max_input_chars: int
    max_stop_sequences: int
    max_top_logprobs: int
    max_ttl: _duration_pb2.Duration
    request_id_retention: _duration_pb2.Duration
    disconnect_grace: _duration_pb2.Duration
    max_candidates: int
    max_beam_width: int
    max_annotations: int
    max_annotation_bytes: int
    def __init__(self, max_request_bytes: _Optional[int] = ..., max_input_chars: _Optional[int] = ..., max_stop_sequences: _Optional[int] = ..., max_top_logprobs: _Optional[int] = ..., max_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., request_id_retention: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., disconnect_grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_candidates: _Optional[int] = ..., max_beam_width: _Optional[int] = ..., max_annotations: _Optional[int] = ..., max_annotation_bytes: _Optional[int] = ...) -> None: ...

class GetUsageRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetUsageResponse(_message.Message):
    __slots__ = ("usage", "replica")
    USAGE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    usage: TenantUsage
    replica: str
    def __init__(self, usage: _Optional[_Union[TenantUsage, _Mapping]] = ..., replica: _Optional[str] = ...) -> None: ...

class TenantUsage(_message.Message):
    __slots__ = ("tenant", "turns", "refused_turns", "computed_tokens", "cached_tokens", "output_tokens", "device_tokens", "host_tokens", "sessions", "stored_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_TURNS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    turns: int
    refused_turns: int
    computed_tokens: int
    cached_tokens: int
    output_tokens: int
    device_tokens: int
    host_tokens: int
    sessions: int
    stored_bytes: int
    def __init__(self, tenant: _Optional[str] = ..., turns: _Optional[int] = ..., refused_turns: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., device_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., sessions: _Optional[int] = ..., stored_bytes: _Optional[int] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("replica", "running_turns", "queued_turns", "gpu_tokens_used", "gpu_tokens_capacity", "host_tokens_used", "host_tokens_capacity", "last_engine_step_time", "store_state", "tenants")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    RUNNING_TURNS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TURNS_FIELD_NUMBER: _ClassVar[int]
    GPU_TOKENS_USED_FIELD_NUMBER: _ClassVar[int]
    GPU_TOKENS_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_USED_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    LAST_ENGINE_STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    STORE_STATE_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    running_turns: int
    queued_turns: int
    gpu_tokens_used: int
    gpu_tokens_capacity: int
    host_tokens_used: int
    host_tokens_capacity: int
    last_engine_step_time: _timestamp_pb2.Timestamp
    store_state: str
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUsage]
    def __init__(self, replica: _Optional[str] = ..., running_turns: _Optional[int] = ..., queued_turns: _Optional[int] = ..., gpu_tokens_used: _Optional[int] = ..., gpu_tokens_capacity: _Optional[int] = ..., host_tokens_used: _Optional[int] = ..., host_tokens_capacity: _Optional[int] = ..., last_engine_step_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., store_state: _Optional[str] = ..., tenants: _Optional[_Iterable[_Union[TenantUsage, _Mapping]]] = ...) -> None: ...

class EvictCacheRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class EvictCacheResponse(_message.Message):
    __slots__ = ("tokens_evicted",)
    TOKENS_EVICTED_FIELD_NUMBER: _ClassVar[int]
    tokens_evicted: int
    def __init__(self, tokens_evicted: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline",)
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    deadline: _duration_pb2.Duration
    def __init__(self, deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("turns_left",)
    TURNS_LEFT_FIELD_NUMBER: _ClassVar[int]
    turns_left: int
    def __init__(self, turns_left: _Optional[int] = ...) -> None: ...

class DeviceMemory(_message.Message):
    __slots__ = ("held", "wanted", "floor", "ceiling")
    HELD_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    CEILING_FIELD_NUMBER: _ClassVar[int]
    held: int
    wanted: int
    floor: int
    ceiling: int
    def __init__(self, held: _Optional[int] = ..., wanted: _Optional[int] = ..., floor: _Optional[int] = ..., ceiling: _Optional[int] = ...) -> None: ...

class GetMemoryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMemoryResponse(_message.Message):
    __slots__ = ("device",)
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    device: DeviceMemory
    def __init__(self, device: _Optional[_Union[DeviceMemory, _Mapping]] = ...) -> None: ...

class SetMemoryRequest(_message.Message):
    __slots__ = ("device",)
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    device: str
    def __init__(self, device: _Optional[str] = ...) -> None: ...

class SetMemoryResponse(_message.Message):
    __slots__ = ("device",)
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    device: DeviceMemory
    def __init__(self, device: _Optional[_Union[DeviceMemory, _Mapping]] = ...) -> None: ...
