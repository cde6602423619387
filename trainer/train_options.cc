#include "trainer/train_options.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "trainer/flags.h"

namespace shardd::trainer {
namespace {

constexpr char kIntroduction[] =
    R"(train: trains a byte-level GPT-2 on text files through a shardd daemon, which
owns the optimizer state: a rank that dies loses no committed step.

  train --data=/usr/share/common-licenses --steps=100
      one rank; a private daemon is started if none runs
  shardctl run --ranks 2 -- train --data=DIR --heldout=FILE --stage=2
      two ranks of one job; those that die are started again

RANK, WORLD_SIZE and SHARDD_ADDRESS (set by shardctl run) say which rank this is
and where the daemon is. While that daemon runs, the same command goes on with the
job, and trains it longer with --steps raised.
)";

// Values as the flags give them, before they are put into TrainOptions.
struct Raw {
  bool help = false;
  std::vector<std::string> data;
  std::string heldout, metrics, export_master, address, job = "gpt";
  std::string dtype = "bf16", weights = "shared", schedule = "cosine", resume = "auto",
              optimizer = "adamw";
  int64_t layers = 5, width = 128, heads = 4, context = 128;
  int64_t steps = 600, stage = 2, slots = 0, batch = 8, seed = 1, threads = 1, warmup = 50;
  double lr = 3e-3, lr_final = 0.1, weight_decay = 0.01, clip = 1.0, init_std = 0, momentum = 0.9;
  std::string moments = "fp32";
  bool no_progress = false, split_master = false, stochastic_moments = false,
       stochastic_weights = false;
};

FlagSet MakeFlags(Raw* raw) {
  FlagSet flags;
  flags.Section("Data:");
  flags.List("data", &raw->data, "PATH",
             "Text to train on: a file, or a directory with all regular files below it (symbolic "
             "links are skipped). May be given several times. Needed.");
  flags.Text("heldout", &raw->heldout, "FILE",
             "Text to evaluate on at the end; left out of the training data.");
  flags.Integer("batch", &raw->batch, 1, "Sequences of one slot in a step.");
  flags.Integer("seed", &raw->seed, 0, "Of initial weights and data order.");

  flags.Section("Model:");
  flags.Integer("layers", &raw->layers, 1, "Transformer blocks.");
  flags.Integer("d-model", &raw->width, 1, "Width; a multiple of --heads.");
  flags.Integer("heads", &raw->heads, 1, "Attention heads.");
  flags.Integer("context", &raw->context, 1, "Bytes of a sequence.");
  flags.Real("init-std", &raw->init_std, 0,
             "Standard deviation of initial weights; 0 takes GPT-2's 0.02 at its width of 768, "
             "scaled by sqrt(768 / d-model).");
  flags.Choice("dtype", &raw->dtype, {"fp32", "bf16", "fp16"},
               "Of working weights and gradients. bf16 also computes in bf16; fp16 computes in "
               "fp32, with dynamic loss scaling.");

  flags.Section("Optimization:");
  flags.Text("optimizer", &raw->optimizer, "NAME",
             "Of those that the daemon has, your own among them (docs/optimizers.md).");
  flags.Real("momentum", &raw->momentum, 0, "Of SGD and RMSprop.");
  flags.Choice("moments", &raw->moments, {"fp32", "bf16"},
               "Format in the daemon's memory (docs/optimizers.md).");
  flags.Switch("split-master", &raw->split_master,
               "Keep of the masters what bf16 weights lack: the same bits in less memory.");
  flags.Switch("stochastic-moments", &raw->stochastic_moments,
               "Round bf16 moments at random, by --seed.");
  flags.Switch("stochastic-weights", &raw->stochastic_weights,
               "Round bf16 weights at random, by --seed.");
  flags.Integer("steps", &raw->steps, 1, "Train until this many steps are committed.");
  flags.Real("lr", &raw->lr, 0, "Peak learning rate.");
  flags.Integer("warmup", &raw->warmup, 0, "Steps over which it rises from zero.");
  flags.Choice("schedule", &raw->schedule, {"constant", "cosine", "linear"},
               "How it goes on, down to --lr-final at the last step.");
  flags.Real("lr-final", &raw->lr_final, 0, "Fraction of --lr that is left at the last step.");
  flags.Real("weight-decay", &raw->weight_decay, 0, "Of matrices; vectors do not decay.");
  flags.Real("clip", &raw->clip, 0, "Global gradient norm to clip to; 0 for none.");

  flags.Section("Job:");
  flags.Text("job", &raw->job, "NAME", "Its name with the daemon.");
  flags.Integer("slots", &raw->slots, 0,
                "Parts that the global batch is cut into, the same result for any number of ranks "
                "up to it; 0 means one a rank.");
  flags.Integer("stage", &raw->stage, 0,
                "ZeRO stage, 0 to 3: what is partitioned over the ranks. The result is the same.");
  flags.Choice("weights", &raw->weights, {"shared", "private"},
               "One copy of the working weights a node, or one a rank as on GPUs.");
  flags.Choice("resume", &raw->resume, {"auto", "never", "must"},
               "Go on with the job of that name if there is one; refuse to; insist on it.");
  flags.Text("address", &raw->address, "ADDRESS",
             "The daemon's socket, unix:PATH; otherwise SHARDD_ADDRESS.");
  flags.Integer("threads", &raw->threads, 1,
                "Of this rank. Matrix products, and so the bits of a run, depend on it.");

  flags.Section("Output (of rank 0):");
  flags.Text("metrics", &raw->metrics, "FILE",
             "One JSON line for every committed step, complete whoever was killed.");
  flags.Text(
      "export-master", &raw->export_master, "FILE",
      "Writes the fp32 master weights at the end, as safetensors with Hugging Face's names.");
  flags.Switch("no-progress", &raw->no_progress, "Print no progress.");
  flags.Switch("help", &raw->help, "This text.");
  return flags;
}

JobOptions MakeJob(const Raw& raw, uint32_t world_size) {
  JobOptions job;
  job.name = raw.job;
  job.slots = raw.slots > 0 ? static_cast<uint32_t>(raw.slots) : world_size;
  const DType dtype = raw.dtype == "fp32"   ? DType::kFloat32
                      : raw.dtype == "bf16" ? DType::kBFloat16
                                            : DType::kFloat16;
  job.grad_dtype = dtype;
  job.weight_dtype = dtype;
  job.loss_scale.dynamic = dtype == DType::kFloat16;
  job.loss_scale.initial = dtype == DType::kFloat16 ? 65536.0 : 1.0;
  job.moments = raw.moments == "bf16" ? MomentFormat::kBFloat16 : MomentFormat::kFloat32;
  job.split_master = raw.split_master;
  job.stochastic_moments = raw.stochastic_moments;
  job.stochastic_weights = raw.stochastic_weights;
  if (raw.stochastic_moments || raw.stochastic_weights) job.seed = static_cast<uint64_t>(raw.seed);
  job.stage = static_cast<int>(raw.stage);
  job.weights = raw.weights == "private" ? WeightsMode::kPrivate : WeightsMode::kShared;
  job.max_norm = raw.clip;
  ParameterGroup decay = {.name = "decay",
                          .lr = raw.lr,
                          .beta1 = 0.9,
                          .beta2 = 0.99,
                          .eps = 1e-8,
                          .weight_decay = raw.weight_decay};
  job.optimizer = raw.optimizer;
  if (raw.optimizer == "sgd" || raw.optimizer == "rmsprop") decay.momentum = raw.momentum;
  ParameterGroup no_decay = decay;
  no_decay.name = "no_decay";
  no_decay.weight_decay = 0;
  job.groups = {decay, no_decay};
  return job;
}

absl::Status CheckRanges(const Raw& raw, uint32_t world_size) {
  if (raw.data.empty()) {
    return absl::InvalidArgumentError(
        "--data is missing; name files or directories of text, as in "
        "--data=/usr/share/common-licenses (see --help)");
  }
  if (raw.stage > 3) {
    return absl::InvalidArgumentError(
        absl::StrCat("--stage=", raw.stage, " is refused; it must be 0, 1, 2 or 3"));
  }
  if (raw.slots != 0 && raw.slots < world_size) {
    return absl::InvalidArgumentError(absl::StrCat("--slots=", raw.slots, " is refused; with ",
                                                   world_size, " ranks it must be at least that"));
  }
  if (raw.slots > 65536 || raw.threads > 1024 || raw.batch > (int64_t{1} << 24)) {
    return absl::InvalidArgumentError("--slots, --threads or --batch is out of range");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TrainOptions> ParseTrainOptions(const std::vector<std::string>& arguments,
                                               uint32_t world_size) {
  Raw raw;
  FlagSet flags = MakeFlags(&raw);
  if (absl::Status s = flags.Parse(arguments); !s.ok()) return s;
  TrainOptions options;
  options.help = raw.help;
  if (raw.help) return options;
  if (absl::Status s = CheckRanges(raw, world_size); !s.ok()) return s;
  options.data = raw.data;
  options.heldout = raw.heldout;
  options.model = {.context = raw.context,
                   .width = raw.width,
                   .layers = raw.layers,
                   .heads = raw.heads,
                   .init_std = raw.init_std > 0
                                   ? raw.init_std
                                   : 0.02 * std::sqrt(768.0 / static_cast<double>(raw.width))};
  if (absl::Status s = options.model.Validate(); !s.ok()) return s;
  options.job = MakeJob(raw, world_size);
  options.resume = raw.resume == "never"  ? Resume::kNever
                   : raw.resume == "must" ? Resume::kMust
                                          : Resume::kAuto;
  options.address = raw.address;
  options.steps = static_cast<uint64_t>(raw.steps);
  options.schedule = {.kind = *ParseScheduleKind(raw.schedule),
                      .peak = raw.lr,
                      .final_fraction = raw.lr_final,
                      .warmup = static_cast<uint64_t>(raw.warmup),
                      .steps = options.steps};
  options.sequences = raw.batch;
  options.seed = static_cast<uint64_t>(raw.seed);
  options.threads = static_cast<int>(raw.threads);
  options.metrics = raw.metrics;
  options.export_master = raw.export_master;
  options.progress = !raw.no_progress;
  return options;
}

std::string TrainHelp() {
  Raw raw;
  return absl::StrCat(kIntroduction, MakeFlags(&raw).Help());
}

}  // namespace shardd::trainer
