"""C++ code from .proto files, with Debian's protoc and gRPC plugin."""

def cc_proto(name, src, deps = [], grpc = False, visibility = None):
    """A cc_library of the messages (and, with grpc, the services) of one .proto file.

    Imports are written from the workspace's root, as includes are.

    Args:
      name: of the cc_library.
      src: the .proto file, in this package.
      deps: other cc_proto targets whose .proto files this one imports.
      grpc: also generate service stubs.
      visibility: of the library.
    """
    stem = src[:-len(".proto")]
    native.filegroup(name = name + "_src", srcs = [src], visibility = visibility)
    outs = [stem + ".pb.h", stem + ".pb.cc"]
    cmd = "protoc -I. --cpp_out=$(GENDIR)"
    if grpc:
        outs += [stem + ".grpc.pb.h", stem + ".grpc.pb.cc"]
        cmd += " --grpc_out=$(GENDIR) --plugin=protoc-gen-grpc=/usr/bin/grpc_cpp_plugin"
    native.genrule(
        name = name + "_gen",
        srcs = [src] + [d + "_src" for d in deps],
        outs = outs,
        cmd = cmd + " $(location %s)" % src,
    )
    native.cc_library(
        name = name,
        srcs = [o for o in outs if o.endswith(".cc")],
        hdrs = [o for o in outs if o.endswith(".h")],
        copts = ["-Wno-all", "-Wno-extra"],
        deps = deps + ["//third_party:grpc" if grpc else "//third_party:protobuf"],
        visibility = visibility,
    )
