"""Tables of the results database, as numbered migrations.

What a reader without this package needs is the view ``winners``: one row for each problem,
environment and source for which a winner was chosen. Its columns, which later migrations may add to
but never rename or take away:

| column | type | meaning |
|---|---|---|
| chip | text | name of the chip, "v6e" say |
| problem_key | text | canonical JSON of the facts that change the code (``Problem.key``) |
| problem | text | canonical JSON of the whole problem that was tuned (``Problem.to_json``) |
| name | text | what the shapes file called it |
| variant | text | canonical JSON of the variant (``Variant.to_json``); if trained, of a step |
| variant_id | text | hash of the variant and of what its code was generated from |
| seconds | real | time of one call of the whole problem, or of one step: forward and gradient |
| spread | real | relative spread of repeated measurements; null for a modelled time |
| model_error | real | mean relative error of the chip's time model; null where it has none |
| source | text | "hardware" for a time measured on a device, "compiler" for a modelled one |
| default_seconds | real | the default variant's time of the same source; null if it has none |
| error | real | largest rms(x - reference) / rms(reference) over the outputs |
| jax, jaxlib, libtpu, kdagen, generator | text | what the row was made with; generator is a hash |
| environment_id | integer | greater is later |
| forward_seconds, backward_seconds | real | the parts of a step's time; null if not trained |
| residual_bytes | integer | HBM kept for the gradient beside the operands; null if not trained |
| temporary_bytes | integer | HBM temporaries of a step's larger program; null if not known |
| residual_limit_bytes | integer | most residual bytes that were allowed; null for no limit |

A problem is trained where its residuals are not null: a row is a training step then, of a forward
and a backward kernel (``kdagen.gradient.step.Step``).

A file that ships holds one chip; a file that ``kdagen tune`` writes may hold several, and several
environments of each.
"""

from __future__ import annotations

from sqlite_utils import Database, Migrations

STATUSES = ("ok", "illegal", "compile_failed", "vmem", "died", "hung", "wrong")
SOURCES = ("hardware", "compiler")

migrations = Migrations("kdagen")


def _one_of(column: str, values: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


@migrations()
def m001_results(db: Database) -> None:
    """Environments, problems, results and their numerical errors, winners."""
    # Written as SQL for the CHECK constraints, which sqlite-utils' create() has no words for.
    db.execute(
        """
        CREATE TABLE environments (
          id INTEGER PRIMARY KEY,
          chip TEXT NOT NULL,
          jax TEXT NOT NULL,
          jaxlib TEXT NOT NULL,
          libtpu TEXT NOT NULL,
          kdagen TEXT NOT NULL,
          generator TEXT NOT NULL,
          model TEXT NOT NULL,
          UNIQUE (chip, jax, jaxlib, libtpu, kdagen, generator, model)
        ) STRICT
        """
    )
    db.execute(
        """
        CREATE TABLE problems (
          id INTEGER PRIMARY KEY,
          problem TEXT NOT NULL UNIQUE CHECK (json_valid(problem)),
          key TEXT NOT NULL CHECK (json_valid(key)),
          name TEXT NOT NULL
        ) STRICT
        """
    )
    db.execute(
        f"""
        CREATE TABLE results (
          id INTEGER PRIMARY KEY,
          environment_id INTEGER NOT NULL REFERENCES environments (id),
          problem_id INTEGER NOT NULL REFERENCES problems (id),
          variant_id TEXT NOT NULL,
          variant TEXT NOT NULL CHECK (json_valid(variant)),
          source TEXT NOT NULL CHECK ({_one_of("source", SOURCES)}),
          status TEXT NOT NULL CHECK ({_one_of("status", STATUSES)}),
          reason TEXT NOT NULL DEFAULT '',
          is_default INTEGER NOT NULL DEFAULT 0 CHECK (is_default IN (0, 1)),
          seconds REAL CHECK (seconds > 0),
          spread REAL CHECK (spread >= 0),
          modelled_seconds REAL CHECK (modelled_seconds > 0),
          model_error REAL CHECK (model_error >= 0),
          loop_bundles INTEGER,
          spills INTEGER,
          dma_in_bytes INTEGER,
          dma_out_bytes INTEGER,
          floor_bytes INTEGER,
          floor_seconds REAL,
          vmem_used_bytes INTEGER,
          vmem_limit_bytes INTEGER,
          UNIQUE (environment_id, problem_id, source, variant_id),
          UNIQUE (id, environment_id, problem_id, source),
          CHECK (status != 'ok' OR seconds IS NOT NULL),
          CHECK (status IN ('ok', 'wrong') OR seconds IS NULL)
        ) STRICT
        """
    )
    # No row for a result: its numbers were not checked.
    db.execute(
        """
        CREATE TABLE errors (
          result_id INTEGER NOT NULL REFERENCES results (id) ON DELETE CASCADE,
          tensor TEXT NOT NULL,
          error REAL,
          bound REAL NOT NULL CHECK (bound > 0),
          PRIMARY KEY (result_id, tensor)
        ) STRICT
        """
    )
    # The compound key holds a winner to the environment, problem and source it is a result of.
    db.execute(
        """
        CREATE TABLE chosen (
          environment_id INTEGER NOT NULL,
          problem_id INTEGER NOT NULL,
          source TEXT NOT NULL,
          result_id INTEGER NOT NULL,
          PRIMARY KEY (environment_id, problem_id, source),
          FOREIGN KEY (result_id, environment_id, problem_id, source)
            REFERENCES results (id, environment_id, problem_id, source)
        ) STRICT
        """
    )
    db.execute(
        """
        CREATE VIEW winners AS
        SELECT
          e.chip, p.key AS problem_key, p.problem, p.name,
          r.variant, r.variant_id, r.seconds, r.spread, r.model_error, r.source,
          (
            SELECT d.seconds FROM results AS d
            WHERE d.environment_id = r.environment_id AND d.problem_id = r.problem_id
              AND d.source = r.source AND d.is_default = 1 AND d.status = 'ok'
          ) AS default_seconds,
          (SELECT max(x.error) FROM errors AS x WHERE x.result_id = r.id) AS error,
          e.jax, e.jaxlib, e.libtpu, e.kdagen, e.generator, e.id AS environment_id
        FROM chosen AS c
        JOIN results AS r ON r.id = c.result_id
        JOIN environments AS e ON e.id = c.environment_id
        JOIN problems AS p ON p.id = c.problem_id
        """
    )


@migrations()
def m002_steps(db: Database) -> None:
    """Training steps: the parts of their time, their memory, and the limit of a choice."""
    for column in (
        "forward_seconds REAL CHECK (forward_seconds > 0)",
        "backward_seconds REAL CHECK (backward_seconds > 0)",
        "residual_bytes INTEGER CHECK (residual_bytes >= 0)",
        "temporary_bytes INTEGER CHECK (temporary_bytes >= 0)",
    ):
        db.execute(f"ALTER TABLE results ADD COLUMN {column}")
    db.execute(
        "ALTER TABLE chosen ADD COLUMN residual_limit_bytes INTEGER "
        "CHECK (residual_limit_bytes >= 0)"
    )
    # The text that SQLite keeps of the view, with more columns.
    (view,) = db.execute("SELECT sql FROM sqlite_master WHERE name = 'winners'").fetchone()
    last = "e.id AS environment_id"
    more = ("r.forward_seconds", "r.backward_seconds", "r.residual_bytes", "r.temporary_bytes")
    db.execute("DROP VIEW winners")
    db.execute(view.replace(last, ", ".join((last, *more, "c.residual_limit_bytes"))))


MIGRATIONS = (m001_results.__name__, m002_steps.__name__)
"""Names of all migrations; a file that had another is of a newer version."""
