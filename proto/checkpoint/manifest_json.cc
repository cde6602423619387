// The manifest as text.
#include <google/protobuf/util/json_util.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "proto/checkpoint/manifest.h"
#include "proto/contract/crc32c.h"
#include "proto/safetensors/format.h"

namespace shardd::checkpoint {

namespace {

using Json = nlohmann::ordered_json;

constexpr char kPrefix[] = "{\"crc32c\":\"";
constexpr size_t kPrefixBytes = sizeof(kPrefix) - 1;
constexpr size_t kSumEnd = kPrefixBytes + 8;
constexpr char kFormat[] = "shardd checkpoint";
// What lies deeper is never looked at, and would be walked by recursion.
constexpr int kMaxDepth = 16;
// It grows by at most some thousands a restart.
constexpr uint64_t kMaxGeneration = uint64_t{1} << 62;

std::string Hex8(uint32_t value) { return absl::StrCat(absl::Hex(value, absl::kZeroPad8)); }
std::string Hex16(uint64_t value) { return absl::StrCat(absl::Hex(value, absl::kZeroPad16)); }

// nlohmann's exceptions end in ParseManifest, and so does this one.
struct ParseFault {
  std::string what;
};

uint64_t FromHex(const Json& json) {
  const std::string& text = json.get_ref<const std::string&>();
  uint64_t value = 0;
  if (text.size() > 16 || !absl::SimpleHexAtoi(text, &value)) {
    throw ParseFault{absl::StrCat("'", text, "' is no number in hex")};
  }
  return value;
}

template <typename Message>
Json MessageJson(const Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(message, &text, options).ok()) return Json();
  return Json::parse(text);
}

template <typename Message>
void ParseMessage(const Json& json, Message* message) {
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = true;
  const auto status = google::protobuf::util::JsonStringToMessage(json.dump(), message, options);
  if (!status.ok()) throw ParseFault{status.ToString()};
}

Json FileJson(const FileEntry& file) {
  Json tensors = Json::array();
  for (const TensorEntry& t : file.tensors) {
    tensors.push_back({{"name", t.name},
                       {"parameter", t.parameter},
                       {"offset", t.offset},
                       {"elements", t.elements},
                       {"begin", t.begin},
                       {"end", t.end},
                       {"crc32c", Hex8(t.crc)}});
  }
  return {{"name", file.name},
          {"kind", file.kind},
          {"bytes", file.bytes},
          {"header_bytes", file.header_bytes},
          {"header_crc32c", Hex8(file.header_crc)},
          {"tensors", std::move(tensors)}};
}

FileEntry ParseFile(const Json& json) {
  FileEntry file;
  json.at("name").get_to(file.name);
  json.at("kind").get_to(file.kind);
  json.at("bytes").get_to(file.bytes);
  json.at("header_bytes").get_to(file.header_bytes);
  file.header_crc = static_cast<uint32_t>(FromHex(json.at("header_crc32c")));
  for (const Json& t : json.at("tensors")) {
    TensorEntry& tensor = file.tensors.emplace_back();
    t.at("name").get_to(tensor.name);
    t.at("parameter").get_to(tensor.parameter);
    t.at("offset").get_to(tensor.offset);
    t.at("elements").get_to(tensor.elements);
    t.at("begin").get_to(tensor.begin);
    t.at("end").get_to(tensor.end);
    tensor.crc = static_cast<uint32_t>(FromHex(t.at("crc32c")));
  }
  return file;
}

Json DecisionJson(const Manifest& m) {
  const contract::DecisionHeader& d = m.decision;
  Json groups = Json::array(), presence = Json::array();
  for (const contract::DecisionGroup& g : m.groups) {
    groups.push_back({{"lr", g.lr},
                      {"beta1", g.beta1},
                      {"beta2", g.beta2},
                      {"eps", g.eps},
                      {"weight_decay", g.weight_decay}});
  }
  for (uint64_t word : m.presence) presence.push_back(Hex16(word));
  return {{"sequence", d.sequence},
          {"result", d.result},
          {"clip_factor_bits", d.clip_factor_bits},
          {"loss_scale", d.loss_scale},
          {"clean_steps", d.clean_steps},
          {"hysteresis_left", d.hysteresis_left},
          {"skipped_steps", d.skipped_steps},
          {"consecutive_skips", d.consecutive_skips},
          {"groups", std::move(groups)},
          {"presence", std::move(presence)},
          {"blob", absl::Base64Escape(m.blob)}};
}

void ParseDecision(const Json& json, Manifest* m) {
  contract::DecisionHeader& d = m->decision;
  json.at("sequence").get_to(d.sequence);
  json.at("result").get_to(d.result);
  json.at("clip_factor_bits").get_to(d.clip_factor_bits);
  json.at("loss_scale").get_to(d.loss_scale);
  json.at("clean_steps").get_to(d.clean_steps);
  json.at("hysteresis_left").get_to(d.hysteresis_left);
  json.at("skipped_steps").get_to(d.skipped_steps);
  json.at("consecutive_skips").get_to(d.consecutive_skips);
  for (const Json& g : json.at("groups")) {
    m->groups.push_back({g.at("lr").get<double>(), g.at("beta1").get<double>(),
                         g.at("beta2").get<double>(), g.at("eps").get<double>(),
                         g.at("weight_decay").get<double>()});
  }
  for (const Json& word : json.at("presence")) m->presence.push_back(FromHex(word));
  if (!absl::Base64Unescape(json.at("blob").get<std::string>(), &m->blob)) {
    throw ParseFault{"its trainer blob is no base64"};
  }
}

// Figures may be NaN or infinite, which JSON has no numbers for: as bits.
Json RecordJson(const contract::StepRecordEntry& r) {
  const auto bits = [](double value) {
    uint64_t word = 0;
    std::memcpy(&word, &value, sizeof(word));
    return Hex16(word);
  };
  return {{"applied", r.applied},
          {"generation", r.generation},
          {"result", r.result},
          {"loss_bits", bits(r.loss)},
          {"grad_norm_bits", bits(r.grad_norm)},
          {"loss_scale", r.loss_scale},
          {"lr", r.lr},
          {"tokens", r.tokens},
          {"unix_nanos", r.unix_nanos},
          {"reason", std::string(r.reason)}};
}

contract::StepRecordEntry ParseRecord(const Json& json, uint64_t step) {
  const auto from_bits = [](const Json& text) {
    const uint64_t word = FromHex(text);
    double value = 0;
    std::memcpy(&value, &word, sizeof(value));
    return value;
  };
  contract::StepRecordEntry r{};
  r.step = step;
  json.at("applied").get_to(r.applied);
  json.at("generation").get_to(r.generation);
  json.at("result").get_to(r.result);
  r.loss = from_bits(json.at("loss_bits"));
  r.grad_norm = from_bits(json.at("grad_norm_bits"));
  json.at("loss_scale").get_to(r.loss_scale);
  json.at("lr").get_to(r.lr);
  json.at("tokens").get_to(r.tokens);
  json.at("unix_nanos").get_to(r.unix_nanos);
  const std::string reason = json.at("reason").get<std::string>();
  std::memcpy(r.reason, reason.data(), std::min(reason.size(), sizeof(r.reason) - 1));
  return r;
}

Json ParametersJson(const Manifest& m) {
  Json list = Json::array();
  for (int i = 0; i < m.parameters.parameters_size(); ++i) {
    const v1::Parameter& p = m.parameters.parameters(i);
    const ParameterState& state = m.parameter_states[static_cast<size_t>(i)];
    list.push_back({{"name", p.name()},
                    {"shape", std::vector<int64_t>(p.shape().begin(), p.shape().end())},
                    {"group", p.group()},
                    {"aliases", std::vector<std::string>(p.aliases().begin(), p.aliases().end())},
                    {"applied", state.applied},
                    {"beta_products", {state.beta1_product, state.beta2_product}}});
  }
  return list;
}

template <typename Message>
void ParseNames(const Json& json, Message* to) {
  to->set_name(json.at("name").get<std::string>());
  for (const Json& extent : json.at("shape")) to->add_shape(extent.get<int64_t>());
  for (const Json& alias : json.at("aliases")) to->add_aliases(alias.get<std::string>());
}

Json FrozenJson(const Manifest& m) {
  Json list = Json::array();
  for (const v1::FrozenParameter& f : m.parameters.frozen()) {
    list.push_back({{"name", f.name()},
                    {"shape", std::vector<int64_t>(f.shape().begin(), f.shape().end())},
                    {"dtype", v1::DType_Name(f.dtype())},
                    {"aliases", std::vector<std::string>(f.aliases().begin(), f.aliases().end())}});
  }
  return list;
}

Json LayoutJson(const Manifest& m) {
  uint64_t flat = 0;
  if (const auto layout = ManifestLayout(m, ""); layout.ok()) flat = layout->flat_elements();
  return {{"flat_elements", flat},
          {"chunk_elements", m.config.chunk_elements()},
          {"bucket_elements", m.config.bucket_elements()},
          {"first_chunk", m.chunks.begin},
          {"chunks", m.chunks.size()}};
}

void ParseParameters(const Json& json, Manifest* m) {
  for (const Json& p : json.at("parameters")) {
    v1::Parameter* parameter = m->parameters.add_parameters();
    ParseNames(p, parameter);
    parameter->set_group(p.at("group").get<uint32_t>());
    ParameterState& state = m->parameter_states.emplace_back();
    p.at("applied").get_to(state.applied);
    state.beta1_product = p.at("beta_products").at(0).get<double>();
    state.beta2_product = p.at("beta_products").at(1).get<double>();
  }
  for (const Json& f : json.at("frozen")) {
    v1::FrozenParameter* frozen = m->parameters.add_frozen();
    ParseNames(f, frozen);
    v1::DType dtype = v1::DTYPE_UNSPECIFIED;
    if (!v1::DType_Parse(f.at("dtype").get<std::string>(), &dtype)) {
      throw ParseFault{absl::StrCat("frozen parameter '", frozen->name(), "' has no known dtype")};
    }
    frozen->set_dtype(dtype);
  }
}

Manifest FromJson(const Json& json) {
  Manifest m;
  json.at("writer").get_to(m.writer);
  json.at("job_id").get_to(m.job_id);
  json.at("uid").get_to(m.uid);
  json.at("created_unix_nanos").get_to(m.created_unix_nanos);
  json.at("step").get_to(m.step);
  json.at("applied").get_to(m.applied);
  json.at("generation").get_to(m.generation);
  m.timeline = FromHex(json.at("timeline"));
  json.at("set").at("member").get_to(m.member);
  json.at("set").at("members").get_to(m.members);
  json.at("optimizer").at("states").get_to(m.states);
  ParseMessage(json.at("config"), &m.config);
  m.chunks.begin = json.at("layout").at("first_chunk").get<uint64_t>();
  m.chunks.end = m.chunks.begin + json.at("layout").at("chunks").get<uint64_t>();
  ParseDecision(json.at("decision"), &m);
  if (json.contains("last_record")) m.record = ParseRecord(json.at("last_record"), m.step);
  ParseParameters(json, &m);
  for (const Json& file : json.at("files")) m.files.push_back(ParseFile(file));
  const size_t words = (m.parameter_states.size() + 63) / 64;
  if (m.config.name() != json.at("job").get<std::string>()) {
    throw ParseFault{"its job and its configuration have different names"};
  }
  if (m.applied > m.step || m.generation > kMaxGeneration) {
    throw ParseFault{"its counters cannot be"};
  }
  if (m.member < 1 || m.member > m.members) throw ParseFault{"its set has no such member"};
  if (m.blob.size() > contract::kMaxBlobBytes) throw ParseFault{"its trainer blob is too large"};
  if (m.presence.size() != words ||
      m.groups.size() != static_cast<size_t>(m.config.groups_size())) {
    throw ParseFault{"its decision is not of its parameters and groups"};
  }
  return m;
}

}  // namespace

std::string SerializeManifest(const Manifest& m) {
  Json json = {{"crc32c", "00000000"},
               {"format", kFormat},
               {"version", kManifestVersion},
               {"writer", m.writer},
               {"job", m.job()},
               {"job_id", m.job_id},
               {"uid", m.uid},
               {"created_unix_nanos", m.created_unix_nanos},
               {"step", m.step},
               {"applied", m.applied},
               {"generation", m.generation},
               {"timeline", Hex16(m.timeline)},
               {"set", {{"member", m.member}, {"members", m.members}}},
               {"optimizer", {{"name", m.config.optimizer()}, {"states", m.states}}},
               {"config", MessageJson(m.config)},
               {"layout", LayoutJson(m)},
               {"decision", DecisionJson(m)}};
  if (m.record.has_value()) json["last_record"] = RecordJson(*m.record);
  json["parameters"] = ParametersJson(m);
  json["frozen"] = FrozenJson(m);
  json["files"] = Json::array();
  for (const FileEntry& file : m.files) json["files"].push_back(FileJson(file));
  std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  const uint32_t crc = contract::Crc32c(text.data() + kSumEnd, text.size() - kSumEnd);
  text.replace(kPrefixBytes, 8, Hex8(crc));
  return text;
}

absl::StatusOr<Manifest> ParseManifest(const std::string& text, const std::string& path) {
  const auto damaged = [&](const std::string& what) {
    return absl::DataLossError(absl::StrCat(path, ": ", what, "; use another checkpoint"));
  };
  if (text.size() < kSumEnd || text.compare(0, kPrefixBytes, kPrefix) != 0) {
    return damaged("is no manifest of a checkpoint");
  }
  const uint32_t crc = contract::Crc32c(text.data() + kSumEnd, text.size() - kSumEnd);
  if (text.compare(kPrefixBytes, 8, Hex8(crc)) != 0) {
    return damaged(absl::StrCat("its checksum is ", text.substr(kPrefixBytes, 8),
                                ", but its bytes have ", Hex8(crc), ": it is damaged"));
  }
  try {
    bool too_deep = false;
    const Json json = Json::parse(text, [&](int depth, Json::parse_event_t, Json&) {
      too_deep = too_deep || depth > kMaxDepth;
      return !too_deep;
    });
    if (too_deep) return damaged("is nested too deeply");
    if (json.at("format") != kFormat) return damaged("is no manifest of a checkpoint");
    if (const int version = json.at("version").get<int>(); version != kManifestVersion) {
      return absl::FailedPreconditionError(absl::StrCat(
          path, ": has format version ", version, "; this version reads ", kManifestVersion,
          ": use the one that wrote it (", json.value("writer", std::string("unknown")), ")"));
    }
    return FromJson(json);
  } catch (const nlohmann::json::exception& e) {
    return damaged(e.what());
  } catch (const ParseFault& fault) {
    return damaged(fault.what);
  }
}

}  // namespace shardd::checkpoint
