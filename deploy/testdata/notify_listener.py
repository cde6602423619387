"""Stands in for systemd: notify_listener.py SOCKET; prints each line that comes to a
NOTIFY_SOCKET, and ends after STOPPING=1."""
import socket
import sys

server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
server.bind(sys.argv[1])
print("listening", flush=True)
while True:
    for line in server.recv(4096).decode().splitlines():
        print(line, flush=True)
        if line == "STOPPING=1":
            sys.exit(0)
