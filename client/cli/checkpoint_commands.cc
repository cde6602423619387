// shardctl checkpoint save, cancel, list, verify, restore, export, import.
#include "absl/strings/str_cat.h"
#include "client/cli/checkpoint_support.h"
#include "client/cli/commands.h"
#include "proto/checkpoint/export_plan.h"

namespace shardd::cli {

namespace {

using Stub = v1::Admin::StubInterface;

class SaveCommand : public Command {
 public:
  const CommandSpec& spec() const override {
    static const CommandSpec* spec = new CommandSpec{
        .name = "checkpoint save",
        .arguments = "JOB",
        .min_words = 1,
        .max_words = 1,
        .summary = "save a job's whole state at one step, while it trains",
        .help =
            "Writes a directory of safetensors files and a manifest below the daemon's\n"
            "checkpoint.directory: weights, moments, step counts, loss scale and the trainer's\n"
            "blob, all of one committed step. Training goes on; ending this command early\n"
            "(Ctrl-C) cancels the save, and nothing of it stays. Prints where it lies and for\n"
            "how long steps had to wait for it.\n\n"
            "  shardctl checkpoint save gpt --rate=200000000 --keep=3"};
    return *spec;
  }
  void AddFlags(FlagSet* flags) override {
    flags->AddUint32("step", "N", "save this step, as soon as it is committed (default: now)",
                     &step_);
    flags->AddDouble("rate", "BYTES", "write at most so many bytes a second", &rate_);
    flags->AddUint32("keep", "N", "afterwards remove all but the newest N checkpoints", &keep_);
    flags->AddBool("detach", "return once the copy is taken; the daemon goes on saving", &detach_);
  }
  absl::StatusOr<int> Run(const Context& context, const std::vector<std::string>& words) override {
    if (rate_ < 0) return absl::InvalidArgumentError("flag --rate must not be negative");
    v1::SaveCheckpointRequest request;
    request.set_job(words[0]);
    request.set_at_step(step_);
    request.set_rate_bytes_per_second(static_cast<uint64_t>(rate_));
    request.set_keep(keep_);
    request.set_detach(detach_);
    auto saved = StreamCheckpoint(context, &Stub::SaveCheckpoint, request);
    if (!saved.ok()) return saved.status();
    PrintResult(context, *saved,
                saved->finished()
                    ? absl::StrCat("saved ", words[0], " at step ", saved->step(), ": ",
                                   saved->path(), ", ", BytesInTime(*saved), "; steps waited ",
                                   FormatSeconds(saved->stall_seconds()))
                    : absl::StrCat("saving ", words[0], " at step ", saved->step(),
                                   "; shardctl status ", words[0], " shows how far it is"));
    return 0;
  }

 private:
  uint32_t step_ = 0;
  double rate_ = 0;
  uint32_t keep_ = 0;
  bool detach_ = false;
};

class CancelCommand : public Command {
 public:
  const CommandSpec& spec() const override {
    static const CommandSpec* spec = new CommandSpec{
        .name = "checkpoint cancel",
        .arguments = "JOB",
        .min_words = 1,
        .max_words = 1,
        .summary = "cancel the save of a job that is running",
        .help =
            "Returns when nothing of the save is left. Checkpoints that are complete stay.\n\n"
            "  shardctl checkpoint cancel gpt"};
    return *spec;
  }
  absl::StatusOr<int> Run(const Context& context, const std::vector<std::string>& words) override {
    auto channel = context.Connect();
    if (!channel.ok()) return channel.status();
    v1::CancelCheckpointRequest request;
    request.set_job(words[0]);
    auto reply = (*channel)->Call(&Stub::CancelCheckpoint, request);
    if (!reply.ok()) return reply.status();
    if (context.output == OutputFormat::kJson) {
      context.out << ToJson(*reply).dump() << "\n";
    } else {
      context.out << (reply->was_running() ? "cancelled the save of " : "there was no save of ")
                  << words[0] << "\n";
    }
    return 0;
  }
};

class ListCommand : public Command {
 public:
  const CommandSpec& spec() const override {
    static const CommandSpec* spec = new CommandSpec{
        .name = "checkpoint list",
        .arguments = "JOB|DIR",
        .min_words = 1,
        .max_words = 1,
        .summary = "the checkpoints of a job, or in a directory",
        .help =
            "One line each: step, size, when it was taken, and what is wrong with it if anything\n"
            "is. A word with a '/' is a directory, read without a daemon.\n\n"
            "  shardctl checkpoint list gpt\n"
            "  shardctl checkpoint list /backup/gpt/"};
    return *spec;
  }
  absl::StatusOr<int> Run(const Context& context, const std::vector<std::string>& words) override {
    if (IsDirectory(words[0])) {
      auto files = ListFiles(words[0]);
      if (!files.ok()) return files.status();
      PrintCheckpoints(context, *files);
      return 0;
    }
    auto channel = context.Connect();
    if (!channel.ok()) return channel.status();
    v1::ListCheckpointsRequest request;
    request.set_job(words[0]);
    auto reply = (*channel)->Call(&Stub::ListCheckpoints, request);
    if (!reply.ok()) return reply.status();
    PrintCheckpoints(context, *reply);
    return 0;
  }
};

class VerifyCommand : public Command {
 public:
  const CommandSpec& spec() const override {
    static const CommandSpec* spec = new CommandSpec{
        .name = "checkpoint verify",
        .arguments = "JOB|DIR",
        .min_words = 1,
        .max_words = 1,
        .summary = "read a checkpoint and compare all of its checksums",
        .help =
            "Reads every byte of the job's newest checkpoint (or --step), or of the one in DIR\n"
            "without a daemon. Damage is named by file and tensor, with exit code 1.\n\n"
            "  shardctl checkpoint verify gpt --step=1000\n"
            "  shardctl checkpoint verify /backup/gpt/step-0000001000"};
    return *spec;
  }
  void AddFlags(FlagSet* flags) override {
    flags->AddUint32("step", "N", "of a job: that step (default: the newest)", &step_);
  }
  absl::StatusOr<int> Run(const Context& context, const std::vector<std::string>& words) override {
    absl::StatusOr<v1::CheckpointProgress> verified;
    if (IsDirectory(words[0])) {
      verified = VerifyFiles(context, words[0]);
    } else {
      v1::VerifyCheckpointRequest request;
      request.set_job(words[0]);
      request.set_step(step_);
      verified = StreamCheckpoint(context, &Stub::VerifyCheckpoint, request);
    }
    if (!verified.ok()) return verified.status();
    PrintResult(context, *verified,
                absl::StrCat(verified->path(), " is sound: step ", verified->step(), ", ",
                             BytesInTime(*verified)));
    return 0;
  }

 private:
  uint32_t step_ = 0;
};

class RestoreCommand : public Command {
 public:
  const CommandSpec& spec() const override {
    static const CommandSpec* spec = new CommandSpec{
        .name = "checkpoint restore",
        .arguments = "JOB",
        .min_words = 1,
        .max_words = 1,
        .summary = "make a job from its newest checkpoint, or from another one",
        .help =
            "Makes job JOB with the state of a checkpoint; trainers that open it then (any\n"
            "number of ranks, any stage) go on after its step. Learning rate, step counts, loss\n"
            "scale and the trainer's blob come with it. A job that exists is refused without\n"
            "--replace, one with ranks attached without --force as well. Every checksum is\n"
            "compared before the job exists.\n\n"
            "  shardctl checkpoint restore gpt --step=1000 --replace"};
    return *spec;
  }
  void AddFlags(FlagSet* flags) override {
    flags->AddUint32("step", "N", "that step (default: the newest that is complete)", &step_);
    flags->AddString("from", "JOB", "whose checkpoint it is (default: the job's own)", &from_);
    flags->AddBool("replace", "in the place of a job of that name", &replace_);
    flags->AddBool("force", "also while ranks are attached to it", &force_);
  }
  absl::StatusOr<int> Run(const Context& context, const std::vector<std::string>& words) override {
    v1::RestoreCheckpointRequest request;
    request.set_job(words[0]);
    request.set_step(step_);
    request.set_from_job(from_);
    request.set_replace(replace_);
    request.set_force(force_);
    auto restored = StreamCheckpoint(context, &Stub::RestoreCheckpoint, request);
    if (!restored.ok()) return restored.status();
    PrintResult(context, *restored,
                absl::StrCat("restored ", words[0], " at step ", restored->step(), " from ",
                             restored->path(), ", ", BytesInTime(*restored)));
    return 0;
  }

 private:
  uint32_t step_ = 0;
  std::string from_;
  bool replace_ = false;
  bool force_ = false;
};

class ExportCommand : public Command {
 public:
  const CommandSpec& spec() const override {
    static const CommandSpec* spec = new CommandSpec{
        .name = "checkpoint export",
        .arguments = "JOB|DIR",
        .min_words = 1,
        .max_words = 1,
        .summary = "write the weights as one safetensors file for other programs",
        .help =
            "One file with all weights under the names that the trainer registered, tied and\n"
            "frozen ones too, as Hugging Face's loaders read it. Of a running job the daemon\n"
            "writes it beside the job's checkpoints (--name), at the step that is committed. Of\n"
            "a checkpoint's directory no daemon is needed, and --to says where it goes.\n\n"
            "  shardctl checkpoint export gpt --dtype=bf16\n"
            "  shardctl checkpoint export /ckpt/gpt/step-0000001000 --to=model.safetensors"};
    return *spec;
  }
  void AddFlags(FlagSet* flags) override {
    flags->AddString("dtype", "TYPE", "fp32 (default) or bf16", &dtype_);
    flags->AddString("prefix", "TEXT",
                     "before each parameter's own name, e.g. transformer. for GPT2LMHeadModel",
                     &prefix_);
    flags->AddString("to", "FILE", "of a directory: the file to write", &to_);
    flags->AddString("name", "NAME", "of a job: the file's name (default: with step and dtype)",
                     &name_);
  }
  absl::StatusOr<int> Run(const Context& context, const std::vector<std::string>& words) override {
    absl::StatusOr<v1::DType> dtype = checkpoint::ParseExportDType(dtype_);
    if (!dtype.ok()) return dtype.status();
    absl::StatusOr<v1::CheckpointProgress> exported;
    if (IsDirectory(words[0])) {
      if (to_.empty()) {
        return absl::InvalidArgumentError("exporting from a directory needs --to=FILE");
      }
      exported = ExportFiles(context, words[0], *dtype, prefix_, to_);
    } else {
      if (!to_.empty()) {
        return absl::InvalidArgumentError(
            "the daemon writes a job's weights beside its checkpoints: give --name instead of "
            "--to, or export from a checkpoint's directory");
      }
      v1::ExportWeightsRequest request;
      request.set_job(words[0]);
      request.set_dtype(*dtype);
      request.set_file(name_);
      request.set_prefix(prefix_);
      exported = StreamCheckpoint(context, &Stub::ExportWeights, request);
    }
    if (!exported.ok()) return exported.status();
    PrintResult(context, *exported,
                absl::StrCat("exported step ", exported->step(), " to ", exported->path(), ", ",
                             BytesInTime(*exported)));
    return 0;
  }

 private:
  std::string dtype_ = "fp32";
  std::string to_, name_, prefix_;
};

class ImportCommand : public Command {
 public:
  const CommandSpec& spec() const override {
    static const CommandSpec* spec = new CommandSpec{
        .name = "checkpoint import",
        .arguments = "JOB [FILE]",
        .min_words = 1,
        .max_words = 2,
        .summary = "begin a new job with the weights of a safetensors file",
        .help =
            "Notes that job JOB, when its trainers create it, begins with the weights in FILE\n"
            "(below the daemon's checkpoint.directory; absolute, or relative to it) instead of\n"
            "those that they would upload; moments and step counts begin at zero. Names and\n"
            "shapes are compared then, and an Open that does not fit is refused by name.\n"
            "--cancel forgets it.\n\n"
            "  shardctl checkpoint import gpt pretrained/model.safetensors"};
    return *spec;
  }
  void AddFlags(FlagSet* flags) override {
    flags->AddBool("cancel", "forget what was imported for JOB", &cancel_);
  }
  absl::StatusOr<int> Run(const Context& context, const std::vector<std::string>& words) override {
    if (cancel_ == (words.size() == 2)) {
      return absl::InvalidArgumentError("give either FILE or --cancel");
    }
    auto channel = context.Connect();
    if (!channel.ok()) return channel.status();
    v1::ImportWeightsRequest request;
    request.set_job(words[0]);
    request.set_cancel(cancel_);
    if (!cancel_) request.set_path(words[1]);
    auto reply = (*channel)->Call(&Stub::ImportWeights, request, absl::Minutes(10));
    if (!reply.ok()) return reply.status();
    if (context.output == OutputFormat::kJson) {
      context.out << ToJson(*reply).dump() << "\n";
    } else if (cancel_) {
      context.out << words[0] << " begins with what its trainers upload\n";
    } else {
      context.out << words[0] << " will begin with the " << reply->tensors() << " tensors ("
                  << FormatBytes(reply->bytes()) << ") of " << reply->path() << "\n";
    }
    return 0;
  }

 private:
  bool cancel_ = false;
};

}  // namespace

std::unique_ptr<Command> MakeCheckpointSaveCommand() { return std::make_unique<SaveCommand>(); }
std::unique_ptr<Command> MakeCheckpointCancelCommand() { return std::make_unique<CancelCommand>(); }
std::unique_ptr<Command> MakeCheckpointListCommand() { return std::make_unique<ListCommand>(); }
std::unique_ptr<Command> MakeCheckpointVerifyCommand() { return std::make_unique<VerifyCommand>(); }
std::unique_ptr<Command> MakeCheckpointRestoreCommand() {
  return std::make_unique<RestoreCommand>();
}
std::unique_ptr<Command> MakeCheckpointExportCommand() { return std::make_unique<ExportCommand>(); }
std::unique_ptr<Command> MakeCheckpointImportCommand() { return std::make_unique<ImportCommand>(); }

}  // namespace shardd::cli
