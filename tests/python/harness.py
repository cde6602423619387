"""What the package's tests share: a daemon of their own, ranks as processes, JUnit results."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path.cwd()  # of the runfiles
DAEMON = ROOT / "server/shardd"
SHARDCTL = ROOT / "client/cli/shardctl"
PACKAGE = ROOT / "client/python"
HERE = ROOT / "tests/python"


def environment(**more):
    """For a child: the package, its daemon, one thread."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SHARDD_", "RANK", "WORLD_"))}
    env.update(PYTHONPATH=f"{PACKAGE}:{HERE}", SHARDD_DAEMON_BINARY=str(DAEMON),
               OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1",
               TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
    env.update({k: str(v) for k, v in more.items()})
    return env


class Daemon:
    """A daemon with a state directory of its own; it can be killed and started again."""

    def __init__(self, *flags):
        self._directory = tempfile.mkdtemp(prefix="shardd-py-", dir="/tmp")
        self._state = tempfile.mkdtemp(prefix="shardd-py-", dir="/dev/shm")
        self.address = f"{self._directory}/d.sock"
        self.checkpoints = f"{self._directory}/checkpoints"
        self._flags = flags
        self.process = None
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [DAEMON, f"--listen.socket={self.address}", f"--store.directory={self._state}/state",
             f"--checkpoint.directory={self.checkpoints}", *self._flags],
            stderr=open(f"{self._directory}/log", "ab"))
        self.shardctl("status", "--connect-timeout=60")

    def kill(self):
        self.process.kill()
        self.process.wait()

    def restart(self):
        self.kill()
        self.start()

    def lose_memory(self):
        """The machine dies: what is left is its disk."""
        self.kill()
        shutil.rmtree(f"{self._state}/state")
        self.start()

    def shardctl(self, *arguments):
        done = subprocess.run([SHARDCTL, *arguments, f"--address={self.address}"],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              check=False)
        if done.returncode != 0:
            raise RuntimeError(f"shardctl {arguments}: {done.stderr}")
        return done.stdout

    def log(self):
        return pathlib.Path(f"{self._directory}/log").read_text(encoding="utf-8")

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)
        shutil.rmtree(self._state, ignore_errors=True)


class DaemonCase(unittest.TestCase):
    """One daemon for all cases of a class; each case has jobs of its own names."""

    flags = ()

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(*cls.flags)
        os.environ["SHARDD_ADDRESS"] = cls.daemon.address

    @classmethod
    def tearDownClass(cls):
        os.environ.pop("SHARDD_ADDRESS", None)
        cls.daemon.close()

    def job(self):
        return self.id().rsplit(".", 2)[-1].replace("_", "-")[-60:]


def run_python(code, *arguments, timeout=240, check=True, **more):
    """Runs Python code (a path, or text) in a process of its own; returns the finished process."""
    command = [sys.executable]
    command += [str(code)] if isinstance(code, pathlib.Path) else ["-c", code]
    done = subprocess.run([*command, *map(str, arguments)], env=environment(**more), text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout,
                          check=False)
    if check and done.returncode != 0:
        raise AssertionError(f"ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done


def start_python(code, *arguments, **more):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)],
                            env=environment(**more), text=True, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run_ranks(code, ranks, *arguments, timeout=240, **more):
    """Runs code as `ranks` processes; returns what each wrote to stdout."""
    with contextlib.ExitStack() as stack:
        children = [start_python(code, *arguments, RANK=r, WORLD_SIZE=ranks, **more)
                    for r in range(ranks)]
        for child in children:
            stack.callback(child.wait)
            stack.callback(child.kill)
        deadline = time.monotonic() + timeout
        outputs = []
        for child in children:
            out, err = child.communicate(timeout=max(1, deadline - time.monotonic()))
            if child.returncode != 0:
                raise AssertionError(f"a rank ended with {child.returncode}:\n{out}\n{err}")
            outputs.append(out)
    return outputs


def free_port():
    import socket
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class _Result(unittest.TextTestResult):
    def __init__(self, *args):
        super().__init__(*args)
        self.cases = []
        self._began = 0.0

    def startTest(self, test):
        self._began = time.monotonic()
        super().startTest(test)

    def stopTest(self, test):
        bad = [text for failed, text in self.failures + self.errors
               if failed is test or getattr(failed, "test_case", None) is test]
        self.cases.append((test.id(), time.monotonic() - self._began, bad))
        super().stopTest(test)


def main():
    """unittest.main, with results for tests/run."""
    program = unittest.main(module="__main__", exit=False, verbosity=2,
                            testRunner=unittest.TextTestRunner(resultclass=_Result, verbosity=2))
    result = program.result
    suite = xml.etree.ElementTree.Element("testsuite", name="python")
    for name, seconds, bad in result.cases:
        group, case = name.split(".")[-2:]
        node = xml.etree.ElementTree.SubElement(suite, "testcase", classname=group, name=case,
                                                time=f"{seconds:.3f}")
        for text in bad:
            xml.etree.ElementTree.SubElement(node, "failure").text = text
    if path := os.environ.get("XML_OUTPUT_FILE"):
        xml.etree.ElementTree.ElementTree(suite).write(path)
    sys.exit(0 if result.wasSuccessful() and result.testsRun > 0 else 1)
