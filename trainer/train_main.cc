// The command `train`: one rank of a training job.
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/client.h"
#include "trainer/data/batches.h"
#include "trainer/data/byte_text.h"
#include "trainer/export_master.h"
#include "trainer/models/gpt2.h"
#include "trainer/progress.h"
#include "trainer/tensor/cpu_device.h"
#include "trainer/train_options.h"
#include "trainer/training_loop.h"

namespace shardd::trainer {
namespace {

constexpr int kExitError = 1;
constexpr int kExitUsage = 2;

// What is read and built before the job is opened.
struct Inputs {
  data::ByteText text;
  std::unique_ptr<models::Gpt2> model;
  std::unique_ptr<data::TrainingBatches> batches;
  std::vector<models::Batch> heldout;
  int64_t elements = 0;  // of all parameters
};

absl::StatusOr<Inputs> Load(const TrainOptions& options) {
  Inputs inputs;
  std::vector<std::string> excluded;
  if (!options.heldout.empty()) {
    const auto heldout = data::ByteText::Load({options.heldout});
    if (!heldout.ok()) return heldout.status();
    inputs.heldout = data::EvaluationBatches(*heldout, options.model.context, options.sequences);
    if (inputs.heldout.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--heldout=", options.heldout, " has fewer than two bytes; name a longer text"));
    }
    excluded.push_back(options.heldout);
  }
  auto text = data::ByteText::Load(options.data, excluded);
  if (!text.ok()) return text.status();
  inputs.text = *std::move(text);
  auto model = models::Gpt2::Create(options.model);
  if (!model.ok()) return model.status();
  inputs.model = *std::move(model);
  for (const tensor::Parameter* p : inputs.model->parameters()) inputs.elements += p->elements();
  return inputs;
}

absl::Status MakeBatches(const TrainOptions& options, Inputs* inputs) {
  auto batches = data::TrainingBatches::Create(&inputs->text, {.seed = options.seed,
                                                               .context = options.model.context,
                                                               .sequences = options.sequences,
                                                               .slots = options.job.slots});
  if (!batches.ok()) return batches.status();
  inputs->batches = std::make_unique<data::TrainingBatches>(*std::move(batches));
  return absl::OkStatus();
}

std::unique_ptr<Progress> MakeProgress(const TrainOptions& options) {
  Progress::Options progress = {.out = stdout,
                                .terminal = isatty(STDOUT_FILENO) == 1,
                                .enabled = options.progress,
                                .steps = options.steps};
  winsize size = {};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    progress.columns = size.ws_col;
  }
  return std::make_unique<Progress>(progress);
}

std::string Greeting(const TrainOptions& options, const Inputs& inputs, const Session& session) {
  return absl::StrFormat(
      "train: GPT-2 of %d parameters (%d layers, width %d, context %d), %d bytes of text in %d "
      "files; job '%s' at step %d of %d; rank 0 of %d, %d slots, stage %d",
      inputs.elements, options.model.layers, options.model.width, options.model.context,
      inputs.text.bytes().size(), inputs.text.files().size(), options.job.name, session.next_step(),
      options.steps, session.world_size(), options.job.slots, options.job.stage);
}

// The masters' metadata says nothing of ranks, stage or job, on which they do not
// depend: equal runs give equal files.
absl::Status Export(const TrainOptions& options, const Inputs& inputs, Session* session,
                    uint64_t step) {
  return ExportMaster(session, *inputs.model,
                      {{"format", "pt"},
                       {"model", "gpt2"},
                       {"step", absl::StrCat(step)},
                       {"n_layer", absl::StrCat(options.model.layers)},
                       {"n_head", absl::StrCat(options.model.heads)},
                       {"n_embd", absl::StrCat(options.model.width)},
                       {"n_ctx", absl::StrCat(options.model.context)}},
                      options.export_master);
}

// What rank 0 does after the last step.
absl::Status Conclude(const TrainOptions& options, const Inputs& inputs, Session* session,
                      Progress* progress, MetricsFile* metrics, TrainingLoop* loop) {
  const absl::StatusOr<TrainSummary> summary = loop->Summarise();
  if (!summary.ok()) return summary.status();
  if (metrics != nullptr) {
    if (absl::Status s = metrics->Sync(); !s.ok()) return s;
  }
  if (!options.export_master.empty()) {
    absl::Status s = Export(options, inputs, session, summary->committed_step);
    if (!s.ok()) return s;
    progress->Message(absl::StrCat("train: masters written to ", options.export_master));
  }
  progress->Message(absl::StrFormat(
      "train: ranks=%d stage=%d steps=%d loss_first=%.4f loss_last=%.4f loss_heldout=%.4f "
      "tokens_per_second=%.0f committed_step=%d",
      session->world_size(), options.job.stage, options.steps, summary->loss_first,
      summary->loss_last, summary->loss_heldout, summary->tokens_per_second,
      summary->committed_step));
  return absl::OkStatus();
}

absl::Status Run(const TrainOptions& options, SessionOptions session_options) {
  // Before anything else, so that mistakes show before the daemon is asked.
  absl::StatusOr<Inputs> inputs = Load(options);
  if (!inputs.ok()) return inputs.status();
  if (absl::Status s = MakeBatches(options, &*inputs); !s.ok()) return s;
  const bool leader = session_options.rank == 0;
  std::unique_ptr<MetricsFile> metrics;
  if (leader && !options.metrics.empty()) {
    auto opened = MetricsFile::Open(options.metrics);
    if (!opened.ok()) return opened.status();
    metrics = *std::move(opened);
  }
  tensor::CpuDevice device({.threads = options.threads});
  const auto session = Session::Open(session_options, options.job, ParameterSpecs(*inputs->model));
  if (!session.ok()) return session.status();
  const std::unique_ptr<Progress> progress = leader ? MakeProgress(options) : nullptr;
  if (leader) progress->Message(Greeting(options, *inputs, **session));
  TrainingLoop loop(options, {.session = session->get(),
                              .model = inputs->model.get(),
                              .device = &device,
                              .batches = inputs->batches.get(),
                              .heldout = inputs->heldout.empty() ? nullptr : &inputs->heldout,
                              .metrics = metrics.get(),
                              .progress = progress.get(),
                              .now = absl::Now});
  if (absl::Status s = loop.Train(); !s.ok()) return s;
  if (leader) {
    absl::Status s =
        Conclude(options, *inputs, session->get(), progress.get(), metrics.get(), &loop);
    if (!s.ok()) return s;
  }
  return (*session)->Close();
}

int Main(const std::vector<std::string>& arguments) {
  absl::StatusOr<SessionOptions> session_options = SessionOptions::FromEnvironment();
  if (!session_options.ok()) {
    std::fprintf(stderr, "train: %s\n", std::string(session_options.status().message()).c_str());
    return kExitUsage;
  }
  const absl::StatusOr<TrainOptions> options =
      ParseTrainOptions(arguments, session_options->world_size);
  if (!options.ok()) {
    std::fprintf(stderr, "train: %s\n", std::string(options.status().message()).c_str());
    return kExitUsage;
  }
  if (options->help) {
    std::fputs(TrainHelp().c_str(), stdout);
    return 0;
  }
  if (!options->address.empty()) session_options->address = options->address;
  session_options->resume = options->resume;
  const uint32_t rank = session_options->rank;
  const absl::Status status = Run(*options, *std::move(session_options));
  if (status.ok()) return 0;
  std::fprintf(stderr, "train: rank %u: %s\n", rank, std::string(status.message()).c_str());
  return kExitError;
}

}  // namespace
}  // namespace shardd::trainer

int main(int argc, char** argv) {
  return shardd::trainer::Main(std::vector<std::string>(argv + 1, argv + argc));
}
