#include "proto/contract/config_path.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/contract/config_json.h"

namespace shardd::contract {

namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// One name of a path with its index, -1 when it has none.
struct Step {
  std::string name;
  int index = -1;
};

// nullopt when the path is malformed.
std::optional<std::vector<Step>> Split(const std::string& path) {
  std::vector<Step> steps;
  size_t begin = 0;
  while (begin <= path.size()) {
    const size_t end = std::min(path.find('.', begin), path.size());
    Step step{path.substr(begin, end - begin), -1};
    const size_t bracket = step.name.find('[');
    if (bracket != std::string::npos) {
      if (step.name.back() != ']') return std::nullopt;
      const std::string digits = step.name.substr(bracket + 1, step.name.size() - bracket - 2);
      if (!absl::SimpleAtoi(digits, &step.index) || step.index < 0) return std::nullopt;
      step.name.resize(bracket);
    }
    if (step.name.empty()) return std::nullopt;
    steps.push_back(std::move(step));
    begin = end + 1;
  }
  return steps;
}

void CollectPaths(const Descriptor* descriptor, const std::string& prefix,
                  std::vector<std::string>* out) {
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const FieldDescriptor* field = descriptor->field(i);
    const std::string path =
        absl::StrCat(JoinPath(prefix, field->name()), field->is_repeated() ? "[0]" : "");
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      CollectPaths(field->message_type(), path, out);
    } else {
      out->push_back(path);
    }
  }
}

// The message type at the longest prefix of `steps` that is valid, and how many
// steps that prefix has.
std::pair<const Descriptor*, size_t> Descend(const Descriptor* root,
                                             const std::vector<Step>& steps) {
  const Descriptor* at = root;
  for (size_t i = 0; i < steps.size(); ++i) {
    const FieldDescriptor* field = at->FindFieldByName(steps[i].name);
    if (field == nullptr || field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) return {at, i};
    at = field->message_type();
  }
  return {at, steps.size()};
}

std::string Prefix(const std::vector<Step>& steps, size_t count) {
  std::string path;
  for (size_t i = 0; i < count; ++i) {
    path = JoinPath(path, steps[i].name);
    if (steps[i].index >= 0) absl::StrAppend(&path, "[", steps[i].index, "]");
  }
  return path;
}

bool Near(size_t distance, const std::string& name) {
  return distance <= std::max<size_t>(1, name.size() / 3);
}

std::string LastName(const std::string& path) {
  const size_t dot = path.rfind('.');
  std::string name = dot == std::string::npos ? path : path.substr(dot + 1);
  return name.substr(0, name.find('['));
}

}  // namespace

std::string JoinPath(const std::string& path, const std::string& name) {
  return path.empty() ? name : absl::StrCat(path, ".", name);
}

size_t EditDistance(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      d[i][j] =
          std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
  }
  return d[a.size()][b.size()];
}

std::vector<std::string> FieldPaths(const Descriptor* descriptor) {
  std::vector<std::string> paths;
  CollectPaths(descriptor, "", &paths);
  return paths;
}

std::string NearestPath(const Descriptor* root, const std::string& path) {
  const std::optional<std::vector<Step>> steps = Split(path);
  // A typo in one name, in the message that the rest of the path leads to.
  if (steps) {
    const auto [at, valid] = Descend(root, *steps);
    if (valid < steps->size()) {
      const std::string& wrong = (*steps)[valid].name;
      std::pair<size_t, std::string> best{std::numeric_limits<size_t>::max(), ""};
      for (int i = 0; i < at->field_count(); ++i) {
        best = std::min(best, {EditDistance(wrong, at->field(i)->name()), at->field(i)->name()});
      }
      if (Near(best.first, wrong)) return JoinPath(Prefix(*steps, valid), best.second);
    }
  }
  // Else the right name in the wrong place.
  const std::string wrong = LastName(path);
  std::pair<std::pair<size_t, size_t>, std::string> best{{std::numeric_limits<size_t>::max(), 0},
                                                         ""};
  for (const std::string& candidate : FieldPaths(root)) {
    const size_t last = EditDistance(wrong, LastName(candidate));
    best = std::min(best, {{last, EditDistance(path, candidate)}, candidate});
  }
  return Near(best.first.first, wrong) ? best.second : "";
}

absl::Status UnknownPath(const Descriptor* root, const std::string& path,
                         const std::string& prefix) {
  const std::string nearest = NearestPath(root, path);
  if (!nearest.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(prefix, "unknown key '", path, "'; did you mean '", nearest, "'?"));
  }
  const std::optional<std::vector<Step>> steps = Split(path);
  const Descriptor* at = steps ? Descend(root, *steps).first : root;
  std::vector<std::string> names;
  for (int i = 0; i < at->field_count(); ++i) names.push_back(at->field(i)->name());
  return absl::InvalidArgumentError(absl::StrCat(
      prefix, "unknown key '", path, "'; the keys there are ", absl::StrJoin(names, ", ")));
}

absl::StatusOr<const FieldDescriptor*> FindLeaf(const Descriptor* root, const std::string& path) {
  const std::optional<std::vector<Step>> steps = Split(path);
  if (!steps) return UnknownPath(root, path, "");
  const Descriptor* at = root;
  for (size_t i = 0; i < steps->size(); ++i) {
    const FieldDescriptor* field = at->FindFieldByName((*steps)[i].name);
    if (field == nullptr) return UnknownPath(root, path, "");
    if (field->is_repeated() != ((*steps)[i].index >= 0)) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", path, "': '", (*steps)[i].name,
                       field->is_repeated() ? "' takes an index, as in " : "' takes no index: ",
                       (*steps)[i].name, field->is_repeated() ? "[0]" : ""));
    }
    const bool last = i + 1 == steps->size();
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) {
      if (last) return field;
      return UnknownPath(root, path, "");
    }
    at = field->message_type();
  }
  return absl::InvalidArgumentError(absl::StrCat("'", path,
                                                 "' holds several settings; name one, as in '",
                                                 JoinPath(path, at->field(0)->name()), "'"));
}

absl::StatusOr<FieldRef> ResolvePath(Message* root, const std::string& path) {
  absl::StatusOr<const FieldDescriptor*> leaf = FindLeaf(root->GetDescriptor(), path);
  if (!leaf.ok()) return leaf.status();
  Message* at = root;
  const std::vector<Step> steps = *Split(path);
  for (const Step& step : steps) {
    const Reflection* r = at->GetReflection();
    const FieldDescriptor* field = at->GetDescriptor()->FindFieldByName(step.name);
    const int size = field->is_repeated() ? r->FieldSize(*at, field) : 0;
    if (field->is_repeated() && step.index > size) {
      return absl::InvalidArgumentError(absl::StrCat("'", path, "': '", step.name, "' has ", size,
                                                     " elements; the next index is ", size));
    }
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE)
      return FieldRef{at, field, step.index};
    if (!field->is_repeated()) {
      at = r->MutableMessage(at, field);
    } else if (step.index == size) {
      at = r->AddMessage(at, field);
    } else {
      at = r->MutableRepeatedMessage(at, field, step.index);
    }
  }
  return absl::InternalError("unreachable: FindLeaf ends at a leaf");
}

}  // namespace shardd::contract
