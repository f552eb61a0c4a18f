"""What the readers make of files, in the order in which a build would see it."""

from data_prep.common.errors import Problems
from data_prep.readers import tasks
from data_prep.readers.tasks import Corpus, ReadOptions


def plan(inputs, problems=None, **options):
    """Tasks of one corpus of these inputs."""
    corpus = Corpus("input", tuple(str(path) for path in inputs))
    return tasks.plan_tasks([corpus], ReadOptions(**options), problems or Problems("stop"))


def read_all(inputs, policy="stop", **options):
    """(texts, problems) of every document of the inputs, in order."""
    problems = Problems(policy)
    found = []
    for task in plan(inputs, problems, **options):
        for piece in task.pieces:
            for document in tasks.read_piece(piece, ReadOptions(**options), problems):
                text = document.text
                found.append(text if isinstance(text, str) else text.decode())
    return found, problems
