"""Refuses to build with a Bazel other than the one the project is built with."""

def check_bazel_version(wanted):
    """Fails unless Bazel is `wanted`.

    Debian's bazel-bootstrap is built without a version stamp, so it reports an
    empty version; it is the 4.2.3 that .bazelversion names.

    Args:
      wanted: the version in .bazelversion.
    """
    found = native.bazel_version
    if found and not found.startswith(wanted):
        fail(("shardd builds with Bazel %s (Debian's bazel-bootstrap), but this is Bazel %s. " +
              "Run deploy/setup and use /usr/bin/bazel.") % (wanted, found))
