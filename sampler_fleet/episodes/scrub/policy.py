"""The policy: every class of leak, why it is one, and what is done about it. Only tables.

Runs inside containers too: imports nothing beyond the standard library of Python 3.9.

Tracked files are never removed for their name, only for what they hold. Patterns don't apply
inside environments (site-packages, node_modules and the like): their files are other projects'.
"""

from __future__ import annotations

from dataclasses import dataclass

# What is done about a leak.
FRESH = "a fresh repository"
REMOVE = "removed"
EDIT = "the entry is cut out"
UNSHARE = "replaced by a copy"
PIN = "one time for all tracked files"
UNSET = "named for whoever starts the container"
REFUSE = "refused or reported: nothing in the tree can mend it"


@dataclass(frozen=True)
class LeakClass:
    """Why something gives the answer away, how it is found, and what is done."""

    reason: str
    found: str
    remedy: str


_BY_NAME = "by its name"

CLASSES: dict[str, LeakClass] = {
    # --- the repository
    "git-history": LeakClass("commits show what came before", "more than one commit", FRESH),
    "git-refs": LeakClass(
        "branches, tags, pulls, remotes and bisect marks lead to the fix",
        "any ref but HEAD's branch",
        FRESH,
    ),
    "git-notes": LeakClass("notes tell of commits", "refs/notes", FRESH),
    "git-stash": LeakClass("a stash holds work in progress", "refs/stash", FRESH),
    "git-replace": LeakClass("replacements hide other objects", "refs/replace", FRESH),
    "git-packed-refs": LeakClass("old refs live on in it", "packed-refs", FRESH),
    "git-reflog": LeakClass("HEAD's past, the fix included", "logs", FRESH),
    "git-worktrees": LeakClass(
        "another working tree keeps commits alive", "worktrees; `.git` is no directory", FRESH
    ),
    "git-alternates": LeakClass(
        "objects are read from elsewhere", "objects/info/alternates", FRESH
    ),
    "git-modules": LeakClass("the repositories of submodules", "modules", FRESH),
    "git-heads": LeakClass(
        "FETCH_HEAD, ORIG_HEAD, MERGE_HEAD, BISECT files and the like name commits",
        "anything of these names",
        FRESH,
    ),
    "git-hooks": LeakClass("hooks run on the policy's commands", "hooks", FRESH),
    "git-config": LeakClass(
        "remotes, URLs, credentials, names", "any setting a fresh repository lacks", FRESH
    ),
    "git-index": LeakClass("a staged fix", "the index differs from HEAD", FRESH),
    "git-objects": LeakClass(
        "objects that no ref needs are one command away",
        "all objects less those reachable from HEAD; git fsck --unreachable",
        FRESH,
    ),
    "git-packs": LeakClass(
        "packs that no cleaning touches, or that git doesn't list",
        ".keep, .promisor, tmp_*, a pack without an index",
        FRESH,
    ),
    "git-rerere": LeakClass("recorded conflict resolutions", "rr-cache", FRESH),
    "git-lfs": LeakClass("files of other commits", "lfs", FRESH),
    "git-shallow": LeakClass("names commits", "shallow, info/grafts", FRESH),
    "git-other": LeakClass("a fresh repository doesn't have it", "all else in `.git`", FRESH),
    "git-damaged": LeakClass("what git can't read can't be checked", "git fails on it", FRESH),
    "nested-repository": LeakClass(
        "a repository of its own inside the tree, a submodule's too",
        "`.git` below the top; HEAD, objects and refs in one directory",
        REMOVE,
    ),
    "git-bundle": LeakClass("a repository in one file", "by its first bytes", REMOVE),
    "stray-pack": LeakClass("objects outside a repository", "by its first bytes", REMOVE),
    # --- files by their name
    "test-cache": LeakClass("names the tests that failed, or keeps environments", _BY_NAME, REMOVE),
    "tool-cache": LeakClass("keeps what files of other versions held", _BY_NAME, REMOVE),
    "package-cache": LeakClass("may hold a later version of the project", _BY_NAME, REMOVE),
    "bytecode": LeakClass(
        "may be compiled from the fixed file",
        "any outside environments; inside, that of files the patch touches, and new names in it",
        REMOVE,
    ),
    "test-report": LeakClass(
        "names failing tests and covered lines", "by its name; XML with <testsuite>", REMOVE
    ),
    "log": LeakClass("what the image's builder saw", _BY_NAME, REMOVE),
    "history-file": LeakClass("what the image's builder typed", _BY_NAME, REMOVE),
    "editor-file": LeakClass("another state of a file", _BY_NAME, REMOVE),
    "patch-file": LeakClass("patches of whoever built the image", _BY_NAME, REMOVE),
    "setup-script": LeakClass("names commits, tests and patches", _BY_NAME, REMOVE),
    "credentials": LeakClass("opens ways to the original", _BY_NAME, REMOVE),
    "build-output": LeakClass(
        "may be built from the fixed file",
        "by its name; new names of the patch in a compiled file",
        REMOVE,
    ),
    "telling-name": LeakClass(
        "names the instance, the fix, its branch or its tag",
        "the given words in names of files and directories",
        REMOVE,
    ),
    # --- the project itself, in another version
    "distribution": LeakClass("a wheel or sdist of the project", _BY_NAME, REMOVE),
    "installed-copy": LeakClass(
        "the project installed in another version",
        "its metadata in site-packages or node_modules; a touched file that differs",
        REMOVE,
    ),
    "egg-info": LeakClass(
        "metadata of a later version", "its version; a file that only the fix adds", REMOVE
    ),
    "other-copy": LeakClass(
        "a touched file in another version",
        "an untracked file of the same path that differs",
        REMOVE,
    ),
    # --- what files hold
    "gold-text": LeakClass("holds lines of the gold patch", "distinctive lines", REMOVE),
    "gold-archive": LeakClass(
        "holds lines of the gold patch", "distinctive lines, in archives at any depth", REMOVE
    ),
    "gold-object": LeakClass("holds lines of the gold patch", "in every git object", FRESH),
    "gold-changelog": LeakClass(
        "tells of the fix", "distinctive lines in a tracked CHANGELOG, NEWS or HISTORY", EDIT
    ),
    "unread-archive": LeakClass(
        "what can't be read can't be checked", "it can't be unpacked", REMOVE
    ),
    # --- edges of the tree
    "outward-link": LeakClass(
        "leads to places that were not cleaned",
        "a link out of the tree, to a directory that is not the system's or to a leak",
        REMOVE,
    ),
    "hard-link": LeakClass(
        "the same file is reachable, and changeable, outside the tree",
        "a tracked file with more names than the tree has",
        UNSHARE,
    ),
    "telling-times": LeakClass(
        "the touched files are newer than all others", "times of tracked files", PIN
    ),
    "applied-fix": LeakClass("the tree holds the fix already", "the patch's hunks", REFUSE),
    "environment": LeakClass(
        "names the instance, holds the patch, or leads to a proxy", "names and values", UNSET
    ),
    "network": LeakClass("the answer is one download away", "a connection succeeds", REFUSE),
}

# Untracked paths outside environments. A pattern with a slash is matched against the end of the
# path, one without against the name; case is ignored.
PATTERNS: dict[str, tuple[str, ...]] = {
    "test-cache": (".pytest_cache", ".hypothesis", ".tox", ".nox", ".testmondata*", ".nyc_output"),
    "tool-cache": (".mypy_cache", ".ruff_cache", ".eggs", ".pytype", ".parcel-cache", ".turbo"),
    "package-cache": (
        *(".cache/pip", ".cache/uv", ".cache/yarn", ".cache/ccache", ".cache/pre-commit"),
        *(".npm/_cacache", ".npm/_logs", "_cacache", ".ccache", ".pip/cache", "pip-cache"),
        *("var/cache/apt/archives", ".cache/pypoetry", ".yarn/cache/*.tmp"),
    ),
    "bytecode": ("__pycache__", "*.pyc", "*.pyo"),
    "test-report": (
        *(".coverage", ".coverage.*", "coverage.xml", "coverage.json", "htmlcov", "lcov.info"),
        *("junit*.xml", "test-*.xml", "nosetests.xml", "test-results", "test-results.xml"),
    ),
    "log": ("*.log", "nohup.out"),
    "history-file": (
        *(".*_history", ".lesshst", ".viminfo", ".wget-hsts", ".local/share/recently-used.xbel"),
    ),
    "editor-file": (
        *("*.swp", "*.swo", "*.swn", "*.un~", "*~", "*.orig", "*.rej", "*.bak", ".#*", "#*#"),
        *(".idea", ".history", "*.scrub-new"),
    ),
    "patch-file": ("*.patch", "*.diff"),
    "setup-script": (
        *("preprocess.sh", "eval.sh", "fix-run.sh", "test-run.sh", "setup_repo.sh", "setup_env.sh"),
        *("run_script.sh", "run_scripts", "before_repo_set_cmd*", "r2e_tests", "solve.sh"),
    ),
    "credentials": (".netrc", ".git-credentials", ".pypirc", ".ssh"),
    "build-output": ("build/lib", "build/lib.*", "build/bdist.*", "build/temp.*"),
}

# What a fresh repository has at the top of `.git`. All else is a leak of the class named below.
GIT_FRESH = frozenset({"HEAD", "config", "index", "objects", "refs"})
GIT_ENTRIES: dict[str, tuple[str, ...]] = {
    "git-packed-refs": ("packed-refs",),
    "git-reflog": ("logs",),
    "git-worktrees": ("worktrees", "commondir", "gitdir"),
    "git-modules": ("modules",),
    "git-heads": (
        *("*_HEAD", "BISECT_*", "MERGE_*", "SQUASH_MSG", "COMMIT_EDITMSG", "rebase-*", "sequencer"),
        *("AUTO_MERGE", "TAG_EDITMSG", "NOTES_*"),
    ),
    "git-hooks": ("hooks",),
    "git-rerere": ("rr-cache", "MERGE_RR"),
    "git-lfs": ("lfs",),
    "git-shallow": ("shallow", "shallow.lock"),
}
GIT_SETTINGS = frozenset(
    {
        *("core.repositoryformatversion", "core.filemode", "core.bare", "core.logallrefupdates"),
        *("core.ignorecase", "core.precomposeunicode", "core.symlinks"),
    }
)

# Tracked files that are no evidence of what the base tree holds: they may tell of the fix.
CARRIERS = ("*.patch", "*.diff", "*.log", "*.rej", "*.orig", "*.bak", "*.swp", "*~", "*.py[co]")
CHANGELOGS = ("change*", "news*", "history*", "release*note*", "whatsnew*", "whats_new*", "upgrad*")
CHANGELOG_FOLDERS = ("changelog*", "changes", "news", "newsfragments", "releases", ".changeset")
CHANGELOG_ENDINGS = ("", ".md", ".rst", ".txt", ".adoc")
COMPILED = ("*.pyc", "*.pyo", "*.class", "*.so", "*.o", "*.a", "*.wasm", "*.dll", "*.pyd", "*.map")
ENVIRONMENTS = ("site-packages", "dist-packages", "node_modules", "python3.*")
ENVIRONMENT_CACHES = ("node_modules/.cache", "node_modules/.vite")  # of the project's own builds
ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
SYSTEM_ROOTS = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/etc", "/opt", "/dev", "/proc", "/sys"),
)
PROXIES = (
    *("http_proxy", "https_proxy", "all_proxy", "ftp_proxy", "pip_index_url"),
    *("pip_extra_index_url", "uv_index_url", "npm_config_registry", "goproxy"),
)
