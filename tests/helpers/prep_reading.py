"""What the readers make of files, in the order in which a build would see it."""

from data_prep.common.errors import Problems
from data_prep.common.records import Corpus, ReadOptions
from data_prep.readers import tasks
from data_prep.readers.documents import read_documents


def plan(inputs, problems=None, **options):
    """Tasks of one corpus of these inputs."""
    corpus = Corpus("input", tuple(str(path) for path in inputs))
    return tasks.group(tasks.list_ranges([corpus], ReadOptions(**options), problems or Problems("stop")))


def read_all(inputs, policy="stop", **options):
    """(texts, problems) of every document of the inputs, in order."""
    problems = Problems(policy)
    found = []
    for task in plan(inputs, problems, **options):
        for part in task.ranges:
            for document in read_documents(part, ReadOptions(**options), problems):
                text = document.text
                found.append(text if isinstance(text, str) else text.decode())
    return found, problems
