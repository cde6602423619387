#include "client/cli/deepspeed_keys.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/deepspeed_keys_json.h"
#include "client/cli/flags.h"

namespace shardd::cli {

namespace {

using Json = nlohmann::ordered_json;

using Flat = std::vector<std::pair<std::string, Json>>;

void Flatten(const Json& object, const std::string& prefix, Flat* flat) {
  for (const auto& [key, value] : object.items()) {
    if (value.is_object() && !value.empty()) {
      Flatten(value, absl::StrCat(prefix, key, "."), flat);
    } else {
      flat->emplace_back(prefix + key, value);
    }
  }
}

class Rules {
 public:
  Rules() : rules_(Json::parse(kDeepSpeedKeysJson)) {}

  // The rule of a key, else the one of a section that it lies in; null: none.
  const Json* Find(const std::string& key) const {
    if (const Json* rule = Exactly(key)) return rule;
    for (size_t end = key.size(); end != std::string::npos && end > 0; end = key.rfind('.', end)) {
      if (const Json* rule = Exactly(key.substr(0, end) + ".*")) return rule;
      --end;
    }
    return nullptr;
  }

  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const Json& rule : rules_) {
      const std::string name = rule["key"];
      if (!name.ends_with("*")) names.push_back(name);
    }
    return names;
  }

 private:
  const Json* Exactly(const std::string& key) const {
    const auto it = std::find_if(rules_.begin(), rules_.end(),
                                 [&](const Json& rule) { return rule["key"] == key; });
    return it != rules_.end() ? &*it : nullptr;
  }

  const Json rules_;
};

// 1 and true are different values, 1 and 1.0 are not.
bool IsOneOf(const Json& value, const Json& values) {
  return std::any_of(values.begin(), values.end(), [&](const Json& other) {
    return value == other && value.is_boolean() == other.is_boolean();
  });
}

std::string Text(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

bool AsksForNothing(const Json& rule, const Json& value, const Flat& flat) {
  if (rule.contains("neutral") && IsOneOf(value, rule["neutral"])) return true;
  if (!rule.contains("switch")) return false;
  return std::none_of(flat.begin(), flat.end(), [&](const auto& entry) {
    return entry.first == rule["switch"] && entry.second != false && !entry.second.is_null();
  });
}

ExplainedKey Explain(const Rules& rules, const std::string& key, const Json& value,
                     const Flat& flat) {
  const Json* rule = rules.Find(key);
  if (rule == nullptr) {
    const std::string near = Nearest(key, rules.Names());
    return {key, value, "unknown",
            absl::StrCat("no key of DeepSpeed",
                         near.empty() ? "" : absl::StrCat("; did you mean ", near, "?"))};
  }
  const std::string fate = (*rule)["fate"], text = (*rule)["text"];
  if (value == "auto" && rule->contains("auto")) {
    return {key, value, fate, absl::StrCat(text, " (auto: ", Text((*rule)["auto"]), ")")};
  }
  if (fate == "refused") {
    const bool off = AsksForNothing(*rule, value, flat);
    return {key, value, off ? "off" : fate, off ? "asks for nothing" : text};
  }
  if (rule->contains("values") && !IsOneOf(value, (*rule)["values"])) {
    if (rule->contains("otherwise")) return {key, value, "refused", (*rule)["otherwise"]};
    const std::string one_of = absl::StrJoin(
        (*rule)["values"], ", ", [](std::string* out, const Json& v) { *out += Text(v); });
    return {key, value, "refused", absl::StrCat("it must be ", one_of)};
  }
  return {key, value, fate, text};
}

}  // namespace

absl::StatusOr<std::vector<ExplainedKey>> ExplainDeepSpeed(const std::string& text,
                                                           const std::string& origin) {
  const Json config = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(origin, " is no JSON object; give a DeepSpeed configuration"));
  }
  Flat flat;
  Flatten(config, "", &flat);
  const Rules rules;
  std::vector<ExplainedKey> out;
  for (const auto& [key, value] : flat) out.push_back(Explain(rules, key, value, flat));
  return out;
}

}  // namespace shardd::cli
