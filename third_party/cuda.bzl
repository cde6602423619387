"""Finds CUDA, and compiles .cu files with nvcc.

Where there is no CUDA the repository's `available` is False, GPU targets are
left out, and the build says so.
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])
cc_library(name = "cudart", linkopts = [{linkopts}])
exports_files(["nvcc_path"])
"""

def _cuda_repository_impl(ctx):
    home = ctx.os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = ctx.path(home + "/bin/nvcc")
    available = nvcc.exists
    if not available:
        # buildifier: disable=print
        print("shardd: no CUDA under %s (CUDA_HOME): GPU kernels are LEFT OUT of this build." % home)
    ctx.file("defs.bzl", "CUDA_AVAILABLE = %s\nCUDA_HOME = \"%s\"\n" % (available, home))
    ctx.file("nvcc_path", home + "/bin/nvcc\n")
    ctx.file("BUILD", _BUILD.format(
        linkopts = "\"-L%s/lib64\", \"-lcudart\", \"-Wl,-rpath,%s/lib64\"" % (home, home) if available else "",
    ))

cuda_repository = repository_rule(
    implementation = _cuda_repository_impl,
    environ = ["CUDA_HOME"],
    local = True,
)

def _cuda_object_impl(ctx):
    out = ctx.actions.declare_file(ctx.label.name + ".o")
    args = [
        "-std=c++20", "-O3", "-c", ctx.file.src.path, "-o", out.path, "-I.",
        "-gencode", "arch=compute_80,code=sm_80",
        "-gencode", "arch=compute_90,code=sm_90",
        # One rounding per written operation, subnormals kept: the element-wise
        # formulas promise the CPU's bits.
        "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true",
        "-Xcompiler", "-fPIC",
    ]
    ctx.actions.run(
        executable = ctx.attr.cuda_home + "/bin/nvcc",
        arguments = args,
        inputs = [ctx.file.src] + ctx.files.hdrs,
        outputs = [out],
        mnemonic = "Nvcc",
        progress_message = "Compiling %s with nvcc" % ctx.file.src.short_path,
        use_default_shell_env = True,
    )
    return [DefaultInfo(files = depset([out]))]

cuda_object = rule(
    implementation = _cuda_object_impl,
    attrs = {
        "src": attr.label(allow_single_file = [".cu"], mandatory = True),
        "hdrs": attr.label_list(allow_files = True),
        "cuda_home": attr.string(mandatory = True),
    },
    doc = "Compiles one .cu file for sm_80 and sm_90; the .o is a source of a cc_library.",
)
