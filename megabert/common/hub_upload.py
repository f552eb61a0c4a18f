"""Repositories of the Hugging Face hub to push to: made if they do not exist, one commit at a time, without what is there already."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megabert.common import storage
from megabert.common.errors import Failed

T = TypeVar("T")
MAIN = "main"
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # OWNER/NAME


class Repository:
    """A repository of the hub, with the newest commit of each branch. Its methods raise ValueError for what the hub refuses, Failed if
    it cannot be reached."""

    def __init__(self, name: str, private: bool, kind: str = "model") -> None:
        """Make the repository OWNER/NAME if it does not exist; `kind` is "model" or "dataset".

        Raises ValueError for another name, without a token or the right to write, and where it should be `private` and is public.
        """
        import huggingface_hub
        from huggingface_hub import utils

        if not NAME.fullmatch(name):
            raise ValueError(f"{name}: not a repository name; use OWNER/NAME")
        utils.validate_repo_id(name)
        if huggingface_hub.get_token() is None:
            raise ValueError(f"{name}: the hub asks for a token; `hf auth login`, or set HF_TOKEN")
        utils.logging.set_verbosity_error()
        if not sys.stderr.isatty():
            utils.disable_progress_bars()
        self.name, self._hub, self._of = name, huggingface_hub, {"repo_id": name, "repo_type": kind}
        self._api: Any = huggingface_hub.HfApi()
        self._request(lambda: self._api.create_repo(**self._of, private=private or None, exist_ok=True))
        if private and not self._request(lambda: self._api.repo_info(**self._of)).private:
            raise ValueError(f"{name}: is public on the hub; make it private there, or push without --private")
        refs = self._request(lambda: self._api.list_repo_refs(**self._of))
        self._heads = {each.name: each.target_commit for each in refs.branches}

    def _request(self, send: Callable[[], T]) -> T:
        """The hub's answer, with retries after transient failures."""

        def ask() -> T:
            try:
                return send()
            except RuntimeError as error:  # around the error of a file's upload in a thread
                raise error.__cause__ or Failed(f"{self.name}: {error}") from None

        return storage.request(self.name, ask, writes=True)  # a commit takes minutes

    def push(
        self, files: Mapping[str, Path | bytes], message: str, branch: str = MAIN, removed: Iterable[str] = ()
    ) -> bool:
        """Add `files`, by their paths in the repository, and remove those of `removed`, in one commit of a branch; whether anything
        changed. Only new content is uploaded.

        A new branch begins at the repository's first commit, which has no model: a push that is killed leaves none, or all of it.
        """
        if branch not in self._heads:
            first = self._request(lambda: self._api.list_repo_commits(**self._of))[-1].commit_id
            self._request(lambda: self._api.create_branch(**self._of, branch=branch, revision=first, exist_ok=True))

        def commit() -> str:
            added = [self._hub.CommitOperationAdd(name, path) for name, path in files.items()]
            changes = [*(self._hub.CommitOperationDelete(name) for name in removed), *added]
            done = self._api.create_commit(**self._of, operations=changes, commit_message=message, revision=branch)
            return str(done.oid)

        before, self._heads[branch] = self._heads.get(branch), self._request(commit)
        return before != self._heads[branch]

    def listing(self) -> dict[str, str]:
        """SHA-256 of each file in the main branch, "" of small ones, which the hub keeps without."""
        tree = self._request(lambda: list(self._api.list_repo_tree(**self._of, recursive=True)))
        files = [each for each in tree if isinstance(each, self._hub.hf_api.RepoFile)]
        return {each.path: each.lfs.sha256 if each.lfs else "" for each in files}
