#include "server/control/job_spec.h"

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/optimizer.h"
#include "proto/contract/config_json.h"
#include "proto/contract/slot_tree.h"
#include "server/step/hyperparameters.h"
#include "server/step/schedule.h"

namespace shardd::control {

namespace {

bool IsDType(v1::DType dtype) {
  return dtype == v1::fp32 || dtype == v1::bf16 || dtype == v1::fp16;
}

absl::Status Refuse(const std::string& path, const std::string& rule) {
  return absl::InvalidArgumentError(absl::StrCat("job configuration: ", path, " ", rule));
}

absl::Status CheckOptimizer(const v1::JobConfig& config) {
  const kernels::Optimizer* optimizer = kernels::FindOptimizer(config.optimizer());
  if (optimizer == nullptr) {
    std::string names;
    for (std::string_view name : kernels::OptimizerNames()) {
      absl::StrAppend(&names, names.empty() ? "" : ", ", std::string(name));
    }
    return Refuse("optimizer",
                  absl::StrCat("'", config.optimizer(), "' is unknown; there are: ", names));
  }
  if (config.groups_size() == 0 || config.groups_size() > 4096) {
    return Refuse("groups", absl::StrCat("has ", config.groups_size(), " entries; give 1 to 4096"));
  }
  for (int g = 0; g < config.groups_size(); ++g) {
    absl::Status status = step::CheckHyperparameters(config.groups(g).hyper(), *optimizer,
                                                     absl::StrCat("groups[", g, "].hyper"));
    if (!status.ok()) return Refuse(std::string(status.message()), "");
  }
  return absl::OkStatus();
}

absl::Status CompleteStateFormat(v1::JobConfig* config) {
  // As it was before there was a choice, so that an older job's hash stays the same.
  if (config->moments() == v1::MomentFormat::fp32) config->clear_moments();
  if (!v1::MomentFormat::Value_IsValid(config->moments())) {
    return Refuse("moments", "is none of fp32, bf16");
  }
  if (config->split_master() && config->weight_dtype() != v1::bf16) {
    return Refuse("split_master",
                  absl::StrCat("is true, and weight_dtype ", v1::DType_Name(config->weight_dtype()),
                               "; a split master needs working weights of bf16: give weight_dtype "
                               "= bf16, or split_master = false"));
  }
  if (config->stochastic_moments() && config->moments() != v1::MomentFormat::bf16) {
    return Refuse("stochastic_moments",
                  "is true, and moments are not bf16: give moments = bf16, or stochastic_moments = "
                  "false");
  }
  if (config->stochastic_weights() && config->weight_dtype() != v1::bf16) {
    return Refuse("stochastic_weights",
                  absl::StrCat("is true, and weight_dtype ", v1::DType_Name(config->weight_dtype()),
                               ": give weight_dtype = bf16, or stochastic_weights = false"));
  }
  if (config->stochastic_weights() && config->split_master()) {
    return Refuse("stochastic_weights",
                  "is true, and split_master too, whose weights are half of the master and rounded "
                  "to nearest: give split_master = false, or stochastic_weights = false");
  }
  if (config->seed() != 0 && !config->stochastic_moments() && !config->stochastic_weights()) {
    return Refuse("seed",
                  absl::StrCat("is ", config->seed(),
                               ", and nothing is rounded stochastically: give "
                               "stochastic_moments or stochastic_weights, or leave seed out"));
  }
  return absl::OkStatus();
}

absl::Status CompleteLossScale(v1::JobConfig* config) {
  v1::LossScale* scale = config->mutable_loss_scale();
  if (scale->initial() == 0) scale->set_initial(scale->dynamic() ? 65536.0 : 1.0);
  if (scale->growth_interval() == 0) scale->set_growth_interval(1000);
  if (scale->hysteresis() == 0) scale->set_hysteresis(2);
  if (scale->floor() == 0) scale->set_floor(1.0);
  // Its inverse is multiplied with in fp32.
  constexpr double kLeast = 0x1p-24;
  if (!(scale->initial() >= kLeast && scale->initial() <= 0x1p24)) {
    return Refuse("loss_scale.initial",
                  absl::StrCat("is ", scale->initial(), "; it must be in [2^-24, 2^24]"));
  }
  if (!(std::isfinite(scale->floor()) && scale->floor() >= kLeast) ||
      (scale->dynamic() && scale->floor() > scale->initial())) {
    return Refuse("loss_scale.floor", absl::StrCat("is ", scale->floor(),
                                                   "; it must be in [2^-24, loss_scale.initial]"));
  }
  return absl::OkStatus();
}

absl::Status CompleteSeconds(const char* path, double fallback, double value,
                             void (v1::JobConfig::*set)(double), v1::JobConfig* config) {
  if (value == 0) (config->*set)(fallback);
  if (value < 0 || !(value <= 1e7)) {
    return Refuse(path, absl::StrCat("is ", value, " seconds; it must be in (0, 1e7]"));
  }
  return absl::OkStatus();
}

absl::Status CompleteDurability(v1::Durability best, v1::JobConfig* config) {
  if (config->durability() == 0) config->set_durability(best);
  switch (config->durability()) {
    case v1::process:
      return absl::OkStatus();
    case v1::node:
      if (best != v1::process) return absl::OkStatus();
      return Refuse("durability",
                    "is node, but this daemon keeps no journals; set its journal.directory to a "
                    "directory on a disk, or give durability = process");
    case v1::peer:
      if (best != v1::process) return absl::OkStatus();
      return Refuse("durability",
                    "is peer, which this daemon does not offer: it keeps no journals; set its "
                    "journal.directory to a directory on a disk, and peers (docs/cluster.md), or "
                    "give durability = process");
    default:
      return Refuse("durability", "is none of process, node, peer");
  }
}

// What two runs may change, cleared; lr too.
v1::JobConfig Essence(const v1::JobConfig& config) {
  v1::JobConfig essence = config;
  essence.clear_stage();
  essence.clear_schedule();
  essence.clear_weights();
  essence.clear_durability();
  essence.clear_join_seconds();
  essence.clear_step_seconds();
  essence.clear_heartbeat_seconds();
  for (v1::ParameterGroup& group : *essence.mutable_groups()) {
    group.clear_name();
    group.mutable_hyper()->clear_lr();
  }
  return essence;
}

}  // namespace

absl::Status CheckJobName(const std::string& name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  };
  if (name.empty() || name.size() > 64 || name.front() == '.' ||
      !std::all_of(name.begin(), name.end(), allowed)) {
    return Refuse("name", absl::StrCat("'", name.substr(0, 80),
                                       "' is not 1 to 64 of [A-Za-z0-9._-] without a leading '.'"));
  }
  return absl::OkStatus();
}

absl::Status CompleteJobConfig(v1::Durability durability, v1::JobConfig* config) {
  if (absl::Status status = CheckJobName(config->name()); !status.ok()) return status;
  if (config->optimizer().empty()) config->set_optimizer("adamw");
  if (absl::Status status = CheckOptimizer(*config); !status.ok()) return status;
  if (config->slots() == 0) config->set_slots(1);
  if (config->slots() > contract::kMaxSlots) {
    return Refuse("slots", absl::StrCat("is ", config->slots(), "; at most ", contract::kMaxSlots));
  }
  if (config->grad_dtype() == 0) config->set_grad_dtype(v1::bf16);
  if (config->weight_dtype() == 0) config->set_weight_dtype(v1::bf16);
  if (!IsDType(config->grad_dtype())) return Refuse("grad_dtype", "is none of fp32, bf16, fp16");
  if (!IsDType(config->weight_dtype()))
    return Refuse("weight_dtype", "is none of fp32, bf16, fp16");
  if (absl::Status status = CompleteStateFormat(config); !status.ok()) return status;
  if (config->stage() > 3) {
    return Refuse("stage", absl::StrCat("is ", config->stage(), "; ZeRO has stages 0 to 3"));
  }
  if (config->weights() == 0) config->set_weights(v1::shared);
  if (config->weights() != v1::shared && config->weights() != v1::private_) {
    return Refuse("weights", "is none of shared, private");
  }
  if (absl::Status status = CompleteDurability(durability, config); !status.ok()) return status;
  if (!std::isfinite(config->max_norm()) || config->max_norm() < 0) {
    return Refuse("max_norm",
                  absl::StrCat("is ", config->max_norm(), "; give 0 (no clipping) or more"));
  }
  if (!std::isfinite(config->reference_tokens()) || config->reference_tokens() < 0) {
    return Refuse("reference_tokens", "must be finite and >= 0");
  }
  if (absl::Status status = CompleteLossScale(config); !status.ok()) return status;
  if (absl::Status status = step::CheckSchedule(config->schedule()); !status.ok()) {
    return Refuse(std::string(status.message()), "");
  }
  absl::Status status = CompleteSeconds("join_seconds", 120, config->join_seconds(),
                                        &v1::JobConfig::set_join_seconds, config);
  status.Update(CompleteSeconds("step_seconds", 600, config->step_seconds(),
                                &v1::JobConfig::set_step_seconds, config));
  status.Update(CompleteSeconds("heartbeat_seconds", 1, config->heartbeat_seconds(),
                                &v1::JobConfig::set_heartbeat_seconds, config));
  if (status.ok() && config->heartbeat_seconds() < 0.01) {  // each one wakes the job's thread
    return Refuse("heartbeat_seconds",
                  absl::StrCat("is ", config->heartbeat_seconds(), "; give 0.01 or more"));
  }
  return status;
}

namespace {

// Names of frozen parameters and other names: each once over all.
absl::Status CheckNames(const v1::OpenRequest& request) {
  std::unordered_set<std::string> names;
  for (const v1::Parameter& p : request.parameters()) names.insert(p.name());
  const auto add = [&](const std::string& name) -> absl::Status {
    if (absl::Status s = contract::CheckParameterName(names.size(), name); !s.ok()) return s;
    if (names.insert(name).second) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("'", name, "' is the name of two parameters; give each its own"));
  };
  for (const v1::Parameter& p : request.parameters()) {
    for (const std::string& alias : p.aliases()) {
      if (absl::Status s = add(alias); !s.ok()) return s;
    }
  }
  for (const v1::FrozenParameter& f : request.frozen()) {
    if (absl::Status s = add(f.name()); !s.ok()) return s;
    for (const std::string& alias : f.aliases()) {
      if (absl::Status s = add(alias); !s.ok()) return s;
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<contract::Layout> MakeLayout(const v1::OpenRequest& request) {
  if (absl::Status s = CheckNames(request); !s.ok()) return s;
  std::vector<contract::ParameterSpec> parameters;
  parameters.reserve(static_cast<size_t>(request.parameters_size()));
  for (const v1::Parameter& p : request.parameters()) {
    parameters.push_back({p.name(), {p.shape().begin(), p.shape().end()}, p.group()});
  }
  contract::Layout::Options options;
  options.chunk_elements = request.config().chunk_elements();
  options.bucket_elements = request.config().bucket_elements();
  options.groups = static_cast<uint32_t>(request.config().groups_size());
  return contract::Layout::Create(std::move(parameters), options);
}

uint64_t ConfigHash(const v1::JobConfig& config) {
  contract::Hasher hasher;
  const v1::JobConfig essence = Essence(config);
  for (const std::string& path : contract::FieldPaths(v1::JobConfig::descriptor())) {
    if (path.find("[0]") != std::string::npos) continue;
    absl::StatusOr<std::string> value = contract::GetField(essence, path);
    if (value.ok()) hasher.Add(path).Add(*value);
  }
  for (const v1::ParameterGroup& group : essence.groups()) {
    const v1::Hyperparameters& h = group.hyper();
    hasher.Add(h.beta1()).Add(h.beta2()).Add(h.eps()).Add(h.weight_decay());
    hasher.Add(h.momentum()).Add(h.dampening()).Add(h.nesterov() ? 1.0 : 0.0).Add(h.lr_decay());
    hasher.Add(h.min_trust()).Add(h.max_trust());
  }
  return hasher.value();
}

std::vector<std::string> ConfigDifferences(const v1::JobConfig& there, const v1::JobConfig& here) {
  const v1::JobConfig a = Essence(there), b = Essence(here);
  std::vector<std::string> lines;
  const auto compare = [&](const std::string& path) {
    const std::string x = contract::GetField(a, path).value_or("(none)");
    const std::string y = contract::GetField(b, path).value_or("(none)");
    if (x != y) lines.push_back(absl::StrCat(path, ": ", x, " there, ", y, " here"));
  };
  for (const std::string& path : contract::FieldPaths(v1::JobConfig::descriptor())) {
    if (path.find("[0]") == std::string::npos) compare(path);
  }
  if (a.groups_size() != b.groups_size()) {
    lines.push_back(
        absl::StrCat("groups: ", a.groups_size(), " there, ", b.groups_size(), " here"));
  } else {
    for (int g = 0; g < a.groups_size(); ++g) {
      for (const char* field : {"beta1", "beta2", "eps", "weight_decay", "momentum", "dampening",
                                "nesterov", "lr_decay", "min_trust", "max_trust"}) {
        compare(absl::StrCat("groups[", g, "].hyper.", field));
      }
    }
  }
  return lines;
}

std::vector<std::string> LayoutDifferences(const contract::Layout& there,
                                           const contract::Layout& here) {
  std::vector<std::string> lines;
  if (there.num_parameters() != here.num_parameters()) {
    lines.push_back(absl::StrCat("parameters: ", there.num_parameters(), " there, ",
                                 here.num_parameters(), " here"));
  }
  const size_t both = std::min(there.num_parameters(), here.num_parameters());
  for (size_t i = 0; i < both && lines.size() < 4; ++i) {
    const contract::ParameterSpec &a = there.parameter(i), &b = here.parameter(i);
    if (a.name != b.name) {
      lines.push_back(absl::StrCat("parameter ", i, ": '", a.name, "' there, '", b.name, "' here"));
    } else if (a.shape != b.shape) {
      lines.push_back(absl::StrCat("parameter '", a.name, "': shape (",
                                   absl::StrJoin(a.shape, ", "), ") there, (",
                                   absl::StrJoin(b.shape, ", "), ") here"));
    } else if (a.group != b.group) {
      lines.push_back(
          absl::StrCat("parameter '", a.name, "': group ", a.group, " there, ", b.group, " here"));
    }
  }
  if (lines.empty() && there.hash() != here.hash()) {
    lines.push_back(absl::StrCat("chunk_elements or bucket_elements: ", there.chunk_elements(),
                                 ", ", there.bucket_elements(), " there, ", here.chunk_elements(),
                                 ", ", here.bucket_elements(), " here"));
  }
  return lines;
}

}  // namespace shardd::control
