#include "client/job_options.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <unordered_set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/contract/config_json.h"

namespace shardd {

namespace {

constexpr double kFp16InitialScale = 65536;

// Row-major strides. Those of an extent of 1, or of a parameter without elements, mean
// nothing.
bool IsContiguous(const ParameterSpec& spec) {
  if (std::find(spec.shape.begin(), spec.shape.end(), 0) != spec.shape.end()) return true;
  int64_t expected = 1;
  for (size_t i = spec.shape.size(); i-- > 0;) {
    if (spec.shape[i] != 1 && spec.strides[i] != expected) return false;
    expected *= spec.shape[i];
  }
  return true;
}

absl::Status CheckStrides(const ParameterSpec& spec) {
  if (spec.strides.empty()) return absl::OkStatus();
  if (spec.strides.size() == spec.shape.size() && IsContiguous(spec)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "parameter '", spec.name, "' of shape (", absl::StrJoin(spec.shape, ","), ") has strides (",
      absl::StrJoin(spec.strides, ","),
      "); only contiguous parameters can be registered: make a contiguous copy of it"));
}

// A number that the file left out, or 0 where 0 means nothing.
template <typename T>
T Or(T value, T otherwise) {
  return value != 0 ? value : otherwise;
}

LossScale ToLossScale(const v1::JobConfig& config) {
  const LossScale defaults =
      JobOptions::ForDType(static_cast<DType>(config.grad_dtype())).loss_scale;
  if (!config.has_loss_scale()) return defaults;
  const v1::LossScale& given = config.loss_scale();
  LossScale out;
  out.dynamic = given.dynamic();
  out.initial = Or(given.initial(), given.dynamic() ? kFp16InitialScale : 1.0);
  out.growth_interval = Or(given.growth_interval(), out.growth_interval);
  out.hysteresis = Or(given.hysteresis(), out.hysteresis);
  out.floor = Or(given.floor(), out.floor);
  return out;
}

Schedule ToSchedule(const v1::Schedule& given) {
  Schedule out;
  if (given.kind() != 0) out.kind = static_cast<ScheduleKind>(given.kind());
  out.warmup_steps = given.warmup_steps();
  out.total_steps = given.total_steps();
  out.decay_steps = given.decay_steps();
  out.initial_factor = given.initial_factor();
  out.final_factor = given.final_factor();
  return out;
}

}  // namespace

size_t DTypeBytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

JobOptions JobOptions::ForDType(DType dtype) {
  JobOptions options;
  options.grad_dtype = dtype;
  options.weight_dtype = dtype;
  if (dtype == DType::kFloat16) {
    options.loss_scale.dynamic = true;
    options.loss_scale.initial = kFp16InitialScale;
  }
  return options;
}

v1::Hyperparameters ToProto(const ParameterGroup& group) {
  v1::Hyperparameters out;
  out.set_lr(group.lr);
  out.set_beta1(group.beta1);
  out.set_beta2(group.beta2);
  out.set_eps(group.eps);
  out.set_weight_decay(group.weight_decay);
  out.set_momentum(group.momentum);
  out.set_dampening(group.dampening);
  out.set_nesterov(group.nesterov);
  out.set_lr_decay(group.lr_decay);
  out.set_min_trust(group.min_trust);
  out.set_max_trust(group.max_trust);
  return out;
}

v1::JobConfig ToProto(const JobOptions& options) {
  v1::JobConfig out;
  out.set_name(options.name);
  out.set_optimizer(options.optimizer);
  for (const ParameterGroup& group : options.groups) {
    v1::ParameterGroup* added = out.add_groups();
    added->set_name(group.name);
    *added->mutable_hyper() = ToProto(group);
  }
  v1::Schedule* schedule = out.mutable_schedule();
  schedule->set_kind(static_cast<v1::ScheduleKind>(options.schedule.kind));
  schedule->set_warmup_steps(options.schedule.warmup_steps);
  schedule->set_total_steps(options.schedule.total_steps);
  schedule->set_decay_steps(options.schedule.decay_steps);
  schedule->set_initial_factor(options.schedule.initial_factor);
  schedule->set_final_factor(options.schedule.final_factor);
  out.set_slots(options.slots);
  out.set_grad_dtype(static_cast<v1::DType>(options.grad_dtype));
  out.set_weight_dtype(static_cast<v1::DType>(options.weight_dtype));
  // 0 for fp32, as it was before there was a choice.
  if (options.moments != MomentFormat::kFloat32) {
    out.set_moments(static_cast<v1::MomentFormat::Value>(options.moments));
  }
  out.set_split_master(options.split_master);
  out.set_stochastic_moments(options.stochastic_moments);
  out.set_stochastic_weights(options.stochastic_weights);
  out.set_seed(options.seed);
  out.set_stage(static_cast<uint32_t>(options.stage));
  out.set_weights(options.weights == WeightsMode::kPrivate ? v1::private_ : v1::shared);
  out.set_max_norm(options.max_norm);
  v1::LossScale* scale = out.mutable_loss_scale();
  scale->set_dynamic(options.loss_scale.dynamic);
  scale->set_initial(options.loss_scale.initial);
  scale->set_growth_interval(options.loss_scale.growth_interval);
  scale->set_hysteresis(options.loss_scale.hysteresis);
  scale->set_floor(options.loss_scale.floor);
  out.set_max_consecutive_skips(options.max_consecutive_skips);
  out.set_reference_tokens(options.reference_tokens);
  out.set_chunk_elements(options.chunk_elements);
  out.set_bucket_elements(options.bucket_elements);
  out.set_durability(static_cast<v1::Durability>(options.durability));
  out.set_join_seconds(absl::ToDoubleSeconds(options.join_timeout));
  out.set_step_seconds(absl::ToDoubleSeconds(options.step_timeout));
  out.set_heartbeat_seconds(absl::ToDoubleSeconds(options.heartbeat));
  return out;
}

JobOptions FromProto(const v1::JobConfig& config) {
  JobOptions out;
  out.name = config.name();
  out.optimizer = config.optimizer();
  out.groups.clear();
  for (const v1::ParameterGroup& group : config.groups()) {
    const v1::Hyperparameters& h = group.hyper();
    out.groups.push_back({group.name(), h.lr(), h.beta1(), h.beta2(), h.eps(), h.weight_decay(),
                          h.momentum(), h.dampening(), h.nesterov(), h.lr_decay(), h.min_trust(),
                          h.max_trust()});
  }
  out.schedule = ToSchedule(config.schedule());
  out.slots = config.slots();
  out.grad_dtype = static_cast<DType>(config.grad_dtype());
  out.weight_dtype = static_cast<DType>(config.weight_dtype());
  if (config.moments() != 0) out.moments = static_cast<MomentFormat>(config.moments());
  out.split_master = config.split_master();
  out.stochastic_moments = config.stochastic_moments();
  out.stochastic_weights = config.stochastic_weights();
  out.seed = config.seed();
  out.stage = static_cast<int>(config.stage());
  out.durability = static_cast<Durability>(config.durability());
  out.weights = config.weights() == v1::private_ ? WeightsMode::kPrivate : WeightsMode::kShared;
  out.max_norm = config.max_norm();
  out.loss_scale = ToLossScale(config);
  out.max_consecutive_skips = config.max_consecutive_skips();
  out.reference_tokens = config.reference_tokens();
  out.chunk_elements = config.chunk_elements();
  out.bucket_elements = config.bucket_elements();
  out.join_timeout = absl::Seconds(config.join_seconds());
  out.step_timeout = absl::Seconds(config.step_seconds());
  out.heartbeat = absl::Seconds(config.heartbeat_seconds());
  return out;
}

absl::StatusOr<JobOptions> JobOptions::FromJson(const std::string& text,
                                                const std::string& origin) {
  v1::JobConfig config = ToProto(JobOptions());
  config.clear_loss_scale();  // its defaults depend on the dtype
  absl::Status status = contract::ParseJson(text, origin, &config);
  if (!status.ok()) return status;
  if (config.stage() > 3) {
    return absl::InvalidArgumentError(
        absl::StrCat(origin, ": 'stage' must be from 0 to 3, not ", config.stage()));
  }
  return FromProto(config);
}

absl::StatusOr<JobOptions> JobOptions::FromJsonFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return absl::NotFoundError(
        absl::StrCat("cannot read the job configuration ", path, "; give the path of a JSON file"));
  }
  std::ostringstream text;
  text << file.rdbuf();
  return FromJson(text.str(), path);
}

uint64_t HyperHash(const std::vector<ParameterGroup>& groups) {
  contract::Hasher hasher;
  for (const ParameterGroup& group : groups) {
    hasher.Add(group.lr).Add(group.beta1).Add(group.beta2).Add(group.eps).Add(group.weight_decay);
    if (group.momentum == 0 && group.dampening == 0 && !group.nesterov && group.lr_decay == 0 &&
        group.min_trust == 0 && group.max_trust == 0) {
      continue;
    }
    hasher.Add(group.momentum).Add(group.dampening).Add(group.nesterov ? 1.0 : 0.0);
    hasher.Add(group.lr_decay).Add(group.min_trust).Add(group.max_trust);
  }
  return hasher.value();
}

absl::Status CheckOpen(const SessionOptions& options, const JobOptions& job,
                       const std::vector<ParameterSpec>& parameters) {
  if (options.world_size == 0 || options.rank >= options.world_size) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", options.rank, " of world_size ",
                                                   options.world_size,
                                                   ": ranks go from 0 to world_size - 1"));
  }
  if (job.slots < options.world_size || job.slots > contract::kMaxSlots) {
    return absl::InvalidArgumentError(
        absl::StrCat("job '", job.name, "' has ", job.slots, " slots and ", options.world_size,
                     " ranks; slots must be from world_size to ", contract::kMaxSlots));
  }
  if (job.stage < 0 || job.stage > 3) {
    return absl::InvalidArgumentError(
        absl::StrCat("job '", job.name, "' has stage ", job.stage, "; stages are 0 to 3"));
  }
  // Every heartbeat wakes a thread here and one of the daemon.
  if (job.heartbeat < absl::Milliseconds(10)) {
    return absl::InvalidArgumentError(absl::StrCat("job '", job.name, "' has a heartbeat of ",
                                                   absl::FormatDuration(job.heartbeat),
                                                   "; it must be 10ms or longer"));
  }
  std::unordered_set<std::string> names;
  for (const ParameterSpec& spec : parameters) {
    absl::Status status = contract::CheckParameterName(names.size(), spec.name);
    status.Update(CheckStrides(spec));
    if (!status.ok()) return status;
    names.insert(spec.name);
  }
  for (const ParameterSpec& spec : parameters) {
    for (const std::string& alias : spec.aliases) {
      if (!names.insert(alias).second) {
        return absl::InvalidArgumentError(
            absl::StrCat("parameter '", spec.name, "' has the alias '", alias,
                         "', which is the name of another; register a tied parameter once"));
      }
    }
  }
  for (const FrozenSpec& spec : job.frozen) {
    std::vector<std::string> of_spec = {spec.name};
    of_spec.insert(of_spec.end(), spec.aliases.begin(), spec.aliases.end());
    for (const std::string& name : of_spec) {
      if (absl::Status s = contract::CheckParameterName(names.size(), name); !s.ok()) return s;
      if (!names.insert(name).second) {
        return absl::InvalidArgumentError(
            absl::StrCat("frozen parameter '", name,
                         "' has the name of another; a parameter is trained or "
                         "frozen, and is registered once"));
      }
    }
  }
  return absl::OkStatus();
}

std::vector<contract::ParameterSpec> LayoutSpecs(const std::vector<ParameterSpec>& parameters) {
  std::vector<contract::ParameterSpec> specs;
  specs.reserve(parameters.size());
  for (const ParameterSpec& spec : parameters) specs.push_back({spec.name, spec.shape, spec.group});
  return specs;
}

}  // namespace shardd
