"""The database: jobs, their attempts, and a row for every change of state. It is the truth about jobs."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    DateTime,
    Dialect,
    Engine,
    Enum,
    ForeignKey,
    TypeDecorator,
    create_engine,
    event,
    func,
    select,
    text,
    update,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    relationship,
    selectinload,
    sessionmaker,
)

from eth_service.states import ACTIVE, JobState
from planner.errors import UserError

_ID_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def now() -> datetime:
    return datetime.now(UTC)


def new_job_id() -> str:
    """A url-safe id that sorts by time: milliseconds since 1970, 30 random bits (`01k2m3n4p5-x7f3qa`)."""

    def digits(number: int, count: int) -> str:
        return "".join(_ID_ALPHABET[number >> 5 * place & 31] for place in reversed(range(count)))

    return f"{digits(int(now().timestamp() * 1000), 10)}-{digits(secrets.randbits(30), 6)}"


class UtcTime(TypeDecorator[datetime]):
    """A point in time; SQLite keeps no zone, so UTC is put back on reading."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)


class Base(DeclarativeBase):
    # States are stored as the words that the interface uses, so that other programs can read them.
    type_annotation_map: ClassVar = {
        JobState: Enum(JobState, native_enum=False, values_callable=lambda states: [s.value for s in states]),
        datetime: UtcTime,
        dict[str, Any]: JSON,
    }


class JobRow(Base):
    """One job. `sequence` orders the queue; `document` is the job as JSON, needing no other file."""

    __tablename__ = "jobs"

    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(unique=True)
    name: Mapped[str]
    document: Mapped[dict[str, Any]]
    state: Mapped[JobState] = mapped_column(index=True)
    reason: Mapped[str]
    created_at: Mapped[datetime]
    state_since: Mapped[datetime]
    stop_reason: Mapped[str | None] = mapped_column(doc="set when a stop was asked for")
    unreachable_since: Mapped[datetime | None]

    attempts: Mapped[list[AttemptRow]] = relationship(order_by="AttemptRow.number", back_populates="job")
    transitions: Mapped[list[TransitionRow]] = relationship(order_by="TransitionRow.id")

    @property
    def attempt(self) -> AttemptRow | None:
        """The latest attempt."""
        return self.attempts[-1] if self.attempts else None


class AttemptRow(Base):
    """One try to run a job, as one Ray job. `submitted_at` is empty until Ray is known to have it."""

    __tablename__ = "attempts"

    id: Mapped[int] = mapped_column(primary_key=True)
    job_sequence: Mapped[int] = mapped_column(ForeignKey("jobs.sequence"), index=True)
    number: Mapped[int]
    submission_id: Mapped[str] = mapped_column(unique=True)
    cluster: Mapped[str]
    folder: Mapped[str]
    created_at: Mapped[datetime]
    submitted_at: Mapped[datetime | None]

    job: Mapped[JobRow] = relationship(back_populates="attempts")


class TransitionRow(Base):
    """One change of state, and why."""

    __tablename__ = "transitions"

    id: Mapped[int] = mapped_column(primary_key=True)
    job_sequence: Mapped[int] = mapped_column(ForeignKey("jobs.sequence"), index=True)
    attempt: Mapped[int] = mapped_column(doc="0 before the first attempt")
    state: Mapped[JobState]
    time: Mapped[datetime]
    reason: Mapped[str]


class Store:
    """Reads and writes jobs. Every method is one transaction and may be called from any thread.

    Rows are handed out detached: they show the moment of the call and are never written back.
    """

    def __init__(self, url: str) -> None:
        """Open the database and make its tables; UserError if it cannot be opened."""
        try:
            self._engine = _open(url)
            Base.metadata.create_all(self._engine)
        except (SQLAlchemyError, ImportError, OSError) as error:
            told = " ".join(str(error).split())
            raise UserError(f"--database = {url!r} cannot be opened: {told}") from None
        self._session = sessionmaker(self._engine, expire_on_commit=False)

    def close(self) -> None:
        self._engine.dispose()

    def check(self) -> None:
        """Raise SQLAlchemyError when the database does not answer."""
        with self._session() as session:
            session.execute(text("select 1"))

    def add(self, *, job_id: str, name: str, document: dict[str, Any]) -> JobRow:
        """A new job at the end of the queue."""
        reason, at = "submitted", now()
        with self._session.begin() as session:
            row = JobRow(
                id=job_id, name=name, document=document, state=JobState.QUEUED, reason=reason,
                created_at=at, state_since=at, attempts=[], transitions=[],
            )  # fmt: skip
            row.transitions.append(TransitionRow(attempt=0, state=row.state, time=at, reason=reason))
            session.add(row)
        return row

    def get(self, job_id: str) -> JobRow | None:
        with self._read() as session:
            return session.scalars(_complete().where(JobRow.id == job_id)).one_or_none()

    def newest(self, *, limit: int, before: str | None = None) -> Sequence[JobRow]:
        """Jobs from the newest to older ones; `before` is the id of the last one already seen."""
        query = _complete().order_by(JobRow.sequence.desc()).limit(limit)
        if before is not None:
            query = query.where(
                JobRow.sequence < select(JobRow.sequence).where(JobRow.id == before).scalar_subquery()
            )
        with self._read() as session:
            return session.scalars(query).all()

    def in_states(self, states: Collection[JobState]) -> Sequence[JobRow]:
        """Jobs in one of these states, in the order of the queue."""
        query = _complete().where(JobRow.state.in_(states)).order_by(JobRow.sequence)
        with self._read() as session:
            return session.scalars(query).all()

    def transition(
        self, job: JobRow, to: JobState, *, reason: str, at: datetime | None = None, attempt: int = 0
    ) -> bool:
        """Change the state if the job may still take it; otherwise (another was faster) return False."""
        before = [state for state in JobState if state.may_become(to)]
        with self._session.begin() as session:
            return _transition(session, job, before, to, reason=reason, at=at or now(), attempt=attempt)

    def begin_attempt(self, job: JobRow, *, cluster: str, home: Path) -> bool:
        """Take a queued job out of the queue and begin its next attempt in one step; False if it has left.

        The attempt's run folder is to be `home`/attempt-N, so that no attempt meets another's files.
        """
        number, at = len(job.attempts) + 1, now()
        with self._session.begin() as session:
            reason = f"attempt {number} begins"
            queued = [JobState.QUEUED]
            if not _transition(session, job, queued, JobState.PLANNING, reason=reason, at=at, attempt=number):
                return False
            session.add(
                AttemptRow(
                    job_sequence=job.sequence, number=number, submission_id=f"eth-{job.id}-{number}",
                    cluster=cluster, folder=str(home / f"attempt-{number}"), created_at=at,
                )
            )  # fmt: skip
        return True

    def mark_submitted(self, attempt: AttemptRow) -> None:
        with self._session.begin() as session:
            session.execute(update(AttemptRow).where(AttemptRow.id == attempt.id).values(submitted_at=now()))

    def ask_to_stop(self, job: JobRow, *, reason: str) -> bool:
        """Note the wish on an active job; the first reason stays. False if the job is not active."""
        with self._session.begin() as session:
            active = update(JobRow).where(JobRow.sequence == job.sequence, JobRow.state.in_(ACTIVE))
            wish = active.values(stop_reason=func.coalesce(JobRow.stop_reason, reason))
            return session.execute(wish).rowcount == 1  # type: ignore[attr-defined]

    def set_unreachable(self, job: JobRow, since: datetime | None) -> None:
        """Note since when nothing is heard of the job's cluster; None when it answers again."""
        with self._session.begin() as session:
            row = update(JobRow).where(JobRow.sequence == job.sequence)
            session.execute(row.values(unreachable_since=since))

    @contextmanager
    def _read(self) -> Iterator[Session]:
        with self._session() as session:
            yield session


def _complete() -> Any:
    return select(JobRow).options(selectinload(JobRow.attempts), selectinload(JobRow.transitions))


def _transition(
    session: Session,
    job: JobRow,
    before: Collection[JobState],
    to: JobState,
    *,
    reason: str,
    at: datetime,
    attempt: int,
) -> bool:
    # Compare and set in one statement, so that two threads can never both take a step.
    row = update(JobRow).where(JobRow.sequence == job.sequence, JobRow.state.in_(before))
    values: dict[str, Any] = {"state": to, "reason": reason, "state_since": at}
    if to.final:
        values["unreachable_since"] = None
    if session.execute(row.values(**values)).rowcount != 1:  # type: ignore[attr-defined]
        return False
    session.add(TransitionRow(job_sequence=job.sequence, attempt=attempt, state=to, time=at, reason=reason))
    return True


def _open(url: str) -> Engine:
    parsed = make_url(url)
    engine = create_engine(parsed)
    if parsed.get_backend_name() == "sqlite":
        if parsed.database:
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        event.listen(engine, "connect", _prepare_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # Write-ahead logging lets the routes read while the monitor writes.
    for pragma in ("journal_mode=WAL", "foreign_keys=ON", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")
