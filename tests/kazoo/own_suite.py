"""Runs the test suite that kazoo ships with itself, against ZooKeeper or against the keeper.

    own_suite.py zookeeper REPORT            writes what passed, failed and was skipped
    own_suite.py keeper BINARY EXPECTED      fails unless every test named in EXPECTED passes

kazoo's harness starts `java ... QuorumPeerMain zoo.cfg`. For the keeper a program named `java` comes first in PATH; it
reads the same zoo.cfg and becomes the keeper. Nothing of kazoo is changed or copied.
"""

import importlib.util
import os
import pathlib
import shlex
import socket
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

# kazoo's zoo.cfg asks for netty, and Debian's zookeeper.jar names only a part of it.
JARS = ("zookeeper", "netty-codec", "netty-resolver", "netty-transport-native-unix-common", "slf4j-nop")
CLASSPATH = ":".join(f"/usr/share/java/{jar}.jar" for jar in JARS)
# kazoo gives each server the ports OFFSET to OFFSET + 4.
PORTS_PER_SERVER = 5
# These take most of the time; each group runs beside the others, and all other modules beside them.
GROUPS = (
    ("test_client",),
    ("test_eventlet_handler", "test_partitioner"),
    ("test_gevent_handler", "test_cache"),
    ("test_lock", "test_watchers"),
)

# At most so many failed tests are run once more.
MAX_REPEATED = 5

# Stands in for java. exec: kazoo's harness sends its signals to the process it started. A test restarts its server and
# waits 5 s for it, so only the first start of a server runs Python, which takes seconds on a busy machine.
SHIM = """#!/bin/sh
set -eu
digest=-Dzookeeper.DigestAuthenticationProvider.superDigest=
for argument; do
    case $argument in "$digest"*) export PORTCULLIS_SUPER_DIGEST="${{argument#"$digest"}}" ;; esac
    config=$argument
done
value() {{ sed -n "s/^$1=//p" "$config"; }}
data=$(value dataDir)
[ -e "$data/key.pem" ] || {python} {convert} "$config"
exec {binary} keeper --data-dir "$data" --listen "127.0.0.1:$(value clientPort)" \\
    --tls-listen "127.0.0.1:$(value secureClientPort)" --tls-cert "$data/cert.pem" --tls-key "$data/key.pem"
"""

# kazoo's keys are in Java's own form; the keeper takes PEM.
CONVERT = """
import os, ssl, sys
import jks, OpenSSL.crypto
config = dict(line.strip().split("=", 1) for line in open(sys.argv[1]) if "=" in line)
store = jks.KeyStore.load(config["ssl.keyStore.location"], config["ssl.keyStore.password"])
entry = next(iter(store.private_keys.values()))
crypto = OpenSSL.crypto
key = crypto.dump_privatekey(crypto.FILETYPE_PEM, crypto.load_privatekey(crypto.FILETYPE_ASN1, entry.pkey))
chain = "".join(ssl.DER_cert_to_PEM_cert(certificate) for _, certificate in entry.cert_chain)
# key.pem is the last one: its existence means that both are complete.
for name, pem in (("cert.pem", chain.encode()), ("key.pem", key)):
    path = os.path.join(config["dataDir"], name)
    with open(os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(pem)
    os.rename(path + ".new", path)
"""

def free_ports(start):
    """The first of five free ports in a row, below the range that the kernel uses for outgoing connections."""
    for first in range(start, 32_000, PORTS_PER_SERVER):
        sockets = []
        try:
            for port in range(first, first + PORTS_PER_SERVER):
                sockets.append(socket.create_server(("127.0.0.1", port)))
            return first
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
    raise SystemExit("no free ports on loopback")


def start_part(directory, path, port, choice):
    """Starts pytest on a part of kazoo.tests, on servers of its own."""
    environment = {
        **os.environ,
        "PATH": path,
        "ZOOKEEPER_CLASSPATH": CLASSPATH,
        "ZOOKEEPER_VERSION": "3.8.0",
        "ZOOKEEPER_CLUSTER_SIZE": "1",
        "ZOOKEEPER_PORT_OFFSET": str(port),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=120", "--tb=short"]
    command += ["--junitxml", str(directory / "report.xml"), *choice]
    return subprocess.Popen(command, cwd=directory, env=environment, stdout=sys.stderr)


def short_class(classname):
    """Module and class alone: pytest puts the way to them in front, which depends on where the project lies."""
    parts = classname.split(".")
    module = max(index for index, part in enumerate(parts) if part.startswith("test_"))
    return ".".join(parts[module:])


def package_directory():
    return importlib.util.find_spec("kazoo.tests").submodule_search_locations[0]


def run_suite(directory, path):
    """Runs kazoo.tests, in parts side by side since it mostly sleeps, and gives {test id: outcome}."""
    package = package_directory()
    choices = [[f"{package}/{module}.py" for module in group] for group in GROUPS]
    choices.append([package, *(f"--ignore={module}" for choice in choices for module in choice)])
    return run_parts(directory, path, choices)


def run_again(directory, path, names):
    """Runs single tests, with nothing beside them."""
    choice = []
    for name in names:
        place, test = name.split("::")
        module, class_name = place.rsplit(".", 1)
        choice.append(f"{package_directory()}/{module}.py::{class_name}::{test}")
    return run_parts(directory, path, [choice])


def run_parts(directory, path, choices):
    """Runs each choice of tests on servers of its own, all at the same time, and gives {test id: outcome}."""
    port = 10_000 + os.getpid() * 7 % 15_000
    parts = []
    for number, choice in enumerate(choices):
        port = free_ports(port)
        place = directory / str(number)
        place.mkdir()
        parts.append((place, start_part(place, path, port, choice)))
        port += PORTS_PER_SERVER
    outcomes = {}
    for place, process in parts:
        process.wait()
        for case in xml.etree.ElementTree.parse(place / "report.xml").iter("testcase"):
            name = short_class(case.get("classname")) + "::" + case.get("name")
            bad = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            # A test that passed and whose teardown broke is listed twice; the worse outcome counts.
            outcomes[name] = bad[0] if bad else outcomes.get(name, "passed")
    return outcomes


def against_zookeeper(report):
    with tempfile.TemporaryDirectory() as directory:
        outcomes = run_suite(pathlib.Path(directory), os.environ["PATH"])
    lines = [f"{outcome} {name}\n" for name, outcome in sorted(outcomes.items())]
    pathlib.Path(report).write_text("".join(lines))
    return 0


def against_keeper(binary, expected):
    wanted = [line for line in pathlib.Path(expected).read_text().split("\n") if line and not line.startswith("#")]
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        shim = directory / "bin" / "java"
        shim.parent.mkdir()
        convert = directory / "convert.py"
        convert.write_text(CONVERT)
        programs = {"python": sys.executable, "convert": convert, "binary": os.path.abspath(binary)}
        shim.write_text(SHIM.format(**{name: shlex.quote(str(path)) for name, path in programs.items()}))
        shim.chmod(0o755)
        path = f"{shim.parent}:{os.environ['PATH']}"
        outcomes = run_suite(directory, path)
        wrong = [name for name in wanted if outcomes.get(name) != "passed"]
        # Some of kazoo's tests have races and fixed sleeps that a busy machine exceeds, for example
        # TestSemaphore::test_handle_session_loss, which may expire its session before the lock is requested. A fault of
        # the keeper fails again.
        failed = [name for name in wrong if outcomes.get(name) in ("failure", "error")]
        if len(failed) <= MAX_REPEATED and failed:
            print("repeated:", *failed)
            again = directory / "again"
            again.mkdir()
            outcomes.update(run_again(again, path, failed))
    wrong = [name for name in wanted if outcomes.get(name) != "passed"]
    for name in wrong:
        print(f"{outcomes.get(name, 'missing')}: {name}")
    print(f"{len(wanted) - len(wrong)} of the {len(wanted)} tests that pass on ZooKeeper pass on the keeper")
    return 1 if wrong or not wanted else 0


def main(arguments):
    match arguments:
        case ["zookeeper", report]:
            return against_zookeeper(report)
        case ["keeper", binary, expected]:
            return against_keeper(binary, expected)
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
