#include "proto/contract/config_json.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <cmath>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/contract/config_path.h"

namespace shardd::contract {

namespace {

using google::protobuf::Descriptor;
using google::protobuf::EnumValueDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using Json = nlohmann::json;

// One scalar on its way into a field, already of the field's C++ type.
struct Scalar {
  int64_t i = 0;
  uint64_t u = 0;
  double d = 0;
  bool b = false;
  std::string s;
  const EnumValueDescriptor* e = nullptr;
};

void Store(Message* message, const FieldDescriptor* field, int index, const Scalar& value) {
  const Reflection* r = message->GetReflection();
  const bool repeated = field->is_repeated();
  const bool append = repeated && index == r->FieldSize(*message, field);
  const auto put = [&](auto set, auto set_repeated, auto add, const auto& v) {
    if (append) {
      (r->*add)(message, field, v);
    } else if (repeated) {
      (r->*set_repeated)(message, field, index, v);
    } else {
      (r->*set)(message, field, v);
    }
  };
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return put(&Reflection::SetInt32, &Reflection::SetRepeatedInt32, &Reflection::AddInt32,
                 static_cast<int32_t>(value.i));
    case FieldDescriptor::CPPTYPE_INT64:
      return put(&Reflection::SetInt64, &Reflection::SetRepeatedInt64, &Reflection::AddInt64,
                 value.i);
    case FieldDescriptor::CPPTYPE_UINT32:
      return put(&Reflection::SetUInt32, &Reflection::SetRepeatedUInt32, &Reflection::AddUInt32,
                 static_cast<uint32_t>(value.u));
    case FieldDescriptor::CPPTYPE_UINT64:
      return put(&Reflection::SetUInt64, &Reflection::SetRepeatedUInt64, &Reflection::AddUInt64,
                 value.u);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return put(&Reflection::SetDouble, &Reflection::SetRepeatedDouble, &Reflection::AddDouble,
                 value.d);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return put(&Reflection::SetFloat, &Reflection::SetRepeatedFloat, &Reflection::AddFloat,
                 static_cast<float>(value.d));
    case FieldDescriptor::CPPTYPE_BOOL:
      return put(&Reflection::SetBool, &Reflection::SetRepeatedBool, &Reflection::AddBool, value.b);
    case FieldDescriptor::CPPTYPE_ENUM:
      return put(&Reflection::SetEnum, &Reflection::SetRepeatedEnum, &Reflection::AddEnum, value.e);
    case FieldDescriptor::CPPTYPE_STRING:
      return put(&Reflection::SetString, &Reflection::SetRepeatedString, &Reflection::AddString,
                 value.s);
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return;
  }
}

std::string EnumNames(const FieldDescriptor* field) {
  std::vector<std::string> names;
  for (int i = 0; i < field->enum_type()->value_count(); ++i) {
    if (field->enum_type()->value(i)->number() != 0) {
      names.push_back(absl::StrCat("'", field->enum_type()->value(i)->name(), "'"));
    }
  }
  return absl::StrJoin(names, ", ");
}

// What a person may write for the field.
std::string Expected(const FieldDescriptor* field) {
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return "an integer from -2147483648 to 2147483647";
    case FieldDescriptor::CPPTYPE_INT64:
      return "an integer of 64 bits";
    case FieldDescriptor::CPPTYPE_UINT32:
      return "an integer from 0 to 4294967295";
    case FieldDescriptor::CPPTYPE_UINT64:
      return "an integer of 64 bits, 0 or more";
    case FieldDescriptor::CPPTYPE_DOUBLE:
    case FieldDescriptor::CPPTYPE_FLOAT:
      return "a finite number";
    case FieldDescriptor::CPPTYPE_BOOL:
      return "true or false";
    case FieldDescriptor::CPPTYPE_ENUM:
      return absl::StrCat("one of ", EnumNames(field));
    case FieldDescriptor::CPPTYPE_STRING:
      return "a string";
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return "an object";
  }
  return "";
}

const EnumValueDescriptor* FindEnum(const FieldDescriptor* field, const std::string& name) {
  const EnumValueDescriptor* value = field->enum_type()->FindValueByName(name);
  return value != nullptr && value->number() != 0 ? value : nullptr;
}

// --- from JSON -------------------------------------------------------------

std::string Found(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > 60) text = absl::StrCat(text.substr(0, 57), "...");
  return absl::StrCat("the ", value.type_name(), " ", text);
}

std::optional<int64_t> JsonSigned(const Json& value) {
  if (!value.is_number_integer()) return std::nullopt;
  if (value.is_number_unsigned() &&
      value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return std::nullopt;
  }
  return value.get<int64_t>();
}

std::optional<Scalar> FromJson(const Json& value, const FieldDescriptor* field) {
  Scalar out;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
    case FieldDescriptor::CPPTYPE_INT64: {
      const std::optional<int64_t> i = JsonSigned(value);
      const bool narrow = field->cpp_type() == FieldDescriptor::CPPTYPE_INT32;
      if (!i || (narrow && *i != static_cast<int32_t>(*i))) return std::nullopt;
      out.i = *i;
      return out;
    }
    case FieldDescriptor::CPPTYPE_UINT32:
    case FieldDescriptor::CPPTYPE_UINT64: {
      if (!value.is_number_unsigned()) return std::nullopt;
      out.u = value.get<uint64_t>();
      const bool narrow = field->cpp_type() == FieldDescriptor::CPPTYPE_UINT32;
      if (narrow && out.u > std::numeric_limits<uint32_t>::max()) return std::nullopt;
      return out;
    }
    case FieldDescriptor::CPPTYPE_DOUBLE:
    case FieldDescriptor::CPPTYPE_FLOAT:
      if (!value.is_number()) return std::nullopt;
      out.d = value.get<double>();
      return std::isfinite(out.d) ? std::optional(out) : std::nullopt;
    case FieldDescriptor::CPPTYPE_BOOL:
      if (!value.is_boolean()) return std::nullopt;
      out.b = value.get<bool>();
      return out;
    case FieldDescriptor::CPPTYPE_ENUM:
      if (!value.is_string()) return std::nullopt;
      out.e = FindEnum(field, value.get<std::string>());
      return out.e != nullptr ? std::optional(out) : std::nullopt;
    case FieldDescriptor::CPPTYPE_STRING:
      if (!value.is_string()) return std::nullopt;
      out.s = value.get<std::string>();
      return out;
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return std::nullopt;
  }
  return std::nullopt;
}

class JsonReader {
 public:
  JsonReader(const std::string& origin, const Descriptor* root) : origin_(origin), root_(root) {}

  absl::Status ReadObject(const Json& object, const std::string& path, Message* message) {
    for (const auto& [key, value] : object.items()) {
      const std::string at = JoinPath(path, key);
      const FieldDescriptor* field = message->GetDescriptor()->FindFieldByName(key);
      if (field == nullptr) return Unknown(at, value);
      absl::Status status = field->is_repeated() ? ReadArray(value, at, field, message)
                                                 : ReadValue(value, at, field, 0, message);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

 private:
  absl::Status ReadArray(const Json& value, const std::string& path, const FieldDescriptor* field,
                         Message* message) {
    if (!value.is_array()) return Mismatch(path, "an array", value);
    const Reflection* r = message->GetReflection();
    std::unique_ptr<Message> defaults;
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE &&
        r->FieldSize(*message, field) > 0) {
      const Message& first = r->GetRepeatedMessage(*message, field, 0);
      defaults.reset(first.New());
      defaults->CopyFrom(first);
    }
    r->ClearField(message, field);
    for (size_t i = 0; i < value.size(); ++i) {
      if (defaults != nullptr) r->AddMessage(message, field)->CopyFrom(*defaults);
      absl::Status status =
          ReadValue(value[i], absl::StrCat(path, "[", i, "]"), field, static_cast<int>(i), message);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status ReadValue(const Json& value, const std::string& path, const FieldDescriptor* field,
                         int index, Message* message) {
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      if (!value.is_object()) return Mismatch(path, "an object", value);
      const Reflection* r = message->GetReflection();
      Message* child = nullptr;
      if (!field->is_repeated()) {
        child = r->MutableMessage(message, field);
      } else if (index < r->FieldSize(*message, field)) {
        child = r->MutableRepeatedMessage(message, field, index);
      } else {
        child = r->AddMessage(message, field);
      }
      return ReadObject(value, path, child);
    }
    const std::optional<Scalar> scalar = FromJson(value, field);
    if (!scalar) return Mismatch(path, Expected(field), value);
    Store(message, field, index, *scalar);
    return absl::OkStatus();
  }

  absl::Status Mismatch(const std::string& path, const std::string& expected, const Json& value) {
    return absl::InvalidArgumentError(
        absl::StrCat(origin_, ": '", path, "' must be ", expected, ", not ", Found(value)));
  }

  absl::Status Unknown(const std::string& path, const Json& value) {
    // An unknown object is named by its first key: adam.weigth_decay says more than adam.
    std::string deep = path;
    for (const Json* at = &value; at->is_object() && !at->empty(); at = &at->begin().value()) {
      deep = JoinPath(deep, at->begin().key());
    }
    std::string nearest = NearestPath(root_, path);
    const std::string& named = nearest.empty() ? deep : path;
    return UnknownPath(root_, named, absl::StrCat(origin_, ": "));
  }

  const std::string& origin_;
  const Descriptor* root_;
};

// Follows the parser's events to find a key that an object has twice, which the
// parser itself would overwrite in silence.
class DuplicateKeys {
 public:
  bool operator()(int /*depth*/, Json::parse_event_t event, Json& parsed) {
    switch (event) {
      case Json::parse_event_t::object_start:
      case Json::parse_event_t::array_start:
        NextElement();
        frames_.push_back({event == Json::parse_event_t::array_start, -1, {}, {}});
        break;
      case Json::parse_event_t::object_end:
      case Json::parse_event_t::array_end:
        frames_.pop_back();
        break;
      case Json::parse_event_t::key:
        frames_.back().key = parsed.get<std::string>();
        if (!frames_.back().keys.insert(frames_.back().key).second && found_.empty()) {
          found_ = Path();
        }
        break;
      case Json::parse_event_t::value:
        NextElement();
        break;
    }
    return true;
  }

  const std::string& found() const { return found_; }

 private:
  struct Frame {
    bool is_array;
    int index;
    std::string key;
    std::unordered_set<std::string> keys;
  };

  void NextElement() {
    if (!frames_.empty() && frames_.back().is_array) ++frames_.back().index;
  }

  std::string Path() const {
    std::string path;
    for (const Frame& frame : frames_) {
      path = frame.is_array ? absl::StrCat(path, "[", frame.index, "]") : JoinPath(path, frame.key);
    }
    return path;
  }

  std::vector<Frame> frames_;
  std::string found_;
};

// --- from text -------------------------------------------------------------

std::optional<Scalar> FromText(const std::string& text, const FieldDescriptor* field) {
  Scalar out;
  int32_t i32;
  uint32_t u32;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      if (!absl::SimpleAtoi(text, &i32)) return std::nullopt;
      out.i = i32;
      return out;
    case FieldDescriptor::CPPTYPE_INT64:
      return absl::SimpleAtoi(text, &out.i) ? std::optional(out) : std::nullopt;
    case FieldDescriptor::CPPTYPE_UINT32:
      if (!absl::SimpleAtoi(text, &u32)) return std::nullopt;
      out.u = u32;
      return out;
    case FieldDescriptor::CPPTYPE_UINT64:
      return absl::SimpleAtoi(text, &out.u) ? std::optional(out) : std::nullopt;
    case FieldDescriptor::CPPTYPE_DOUBLE:
    case FieldDescriptor::CPPTYPE_FLOAT:
      if (!absl::SimpleAtod(text, &out.d) || !std::isfinite(out.d)) return std::nullopt;
      return out;
    case FieldDescriptor::CPPTYPE_BOOL:
      if (text != "true" && text != "false") return std::nullopt;
      out.b = text == "true";
      return out;
    case FieldDescriptor::CPPTYPE_ENUM:
      out.e = FindEnum(field, text);
      return out.e != nullptr ? std::optional(out) : std::nullopt;
    case FieldDescriptor::CPPTYPE_STRING:
      out.s = text;
      return out;
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return std::nullopt;
  }
  return std::nullopt;
}

std::string ToText(const Message& message, const FieldDescriptor* field, int index) {
  const Reflection* r = message.GetReflection();
  const bool repeated = field->is_repeated();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return absl::StrCat(repeated ? r->GetRepeatedInt32(message, field, index)
                                   : r->GetInt32(message, field));
    case FieldDescriptor::CPPTYPE_INT64:
      return absl::StrCat(repeated ? r->GetRepeatedInt64(message, field, index)
                                   : r->GetInt64(message, field));
    case FieldDescriptor::CPPTYPE_UINT32:
      return absl::StrCat(repeated ? r->GetRepeatedUInt32(message, field, index)
                                   : r->GetUInt32(message, field));
    case FieldDescriptor::CPPTYPE_UINT64:
      return absl::StrCat(repeated ? r->GetRepeatedUInt64(message, field, index)
                                   : r->GetUInt64(message, field));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      // 17 digits: SetField reads the same double back.
      return Json(repeated ? r->GetRepeatedDouble(message, field, index)
                           : r->GetDouble(message, field))
          .dump();
    case FieldDescriptor::CPPTYPE_FLOAT:
      return Json(double{repeated ? r->GetRepeatedFloat(message, field, index)
                                  : r->GetFloat(message, field)})
          .dump();
    case FieldDescriptor::CPPTYPE_BOOL:
      return (repeated ? r->GetRepeatedBool(message, field, index) : r->GetBool(message, field))
                 ? "true"
                 : "false";
    case FieldDescriptor::CPPTYPE_ENUM:
      return (repeated ? r->GetRepeatedEnum(message, field, index) : r->GetEnum(message, field))
          ->name();
    case FieldDescriptor::CPPTYPE_STRING:
      return repeated ? r->GetRepeatedString(message, field, index) : r->GetString(message, field);
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return "";
  }
  return "";
}

}  // namespace

absl::Status ParseJson(const std::string& text, const std::string& origin, Message* message) {
  DuplicateKeys duplicates;
  Json json;
  try {
    // nlohmann copies the callback: pass a reference to ours.
    json = Json::parse(text, [&](int depth, Json::parse_event_t event, Json& parsed) {
      return duplicates(depth, event, parsed);
    });
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(origin, ": not valid JSON: ", error.what()));
  }
  if (!duplicates.found().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(origin, ": '", duplicates.found(), "' is given twice; keep one of them"));
  }
  if (!json.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(origin, ": expected an object, not ", Found(json)));
  }
  std::unique_ptr<Message> copy(message->New());
  copy->CopyFrom(*message);
  JsonReader reader(origin, message->GetDescriptor());
  absl::Status status = reader.ReadObject(json, "", copy.get());
  if (status.ok()) message->GetReflection()->Swap(message, copy.get());
  return status;
}

absl::Status SetField(Message* message, const std::string& path, const std::string& text) {
  // Type and value first, so that an error leaves the message as it was.
  absl::StatusOr<const FieldDescriptor*> leaf = FindLeaf(message->GetDescriptor(), path);
  if (!leaf.ok()) return leaf.status();
  const std::optional<Scalar> scalar = FromText(text, *leaf);
  if (!scalar) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", path, "' must be ", Expected(*leaf), ", not '", text, "'"));
  }
  absl::StatusOr<FieldRef> at = ResolvePath(message, path);
  if (!at.ok()) return at.status();
  Store(at->message, at->field, at->index, *scalar);
  return absl::OkStatus();
}

absl::StatusOr<std::string> GetField(const Message& message, const std::string& path) {
  absl::StatusOr<const FieldDescriptor*> leaf = FindLeaf(message.GetDescriptor(), path);
  if (!leaf.ok()) return leaf.status();
  // Resolving may create submessages: look in a copy.
  std::unique_ptr<Message> copy(message.New());
  copy->CopyFrom(message);
  absl::StatusOr<FieldRef> at = ResolvePath(copy.get(), path);
  if (!at.ok()) return at.status();
  if (at->field->is_repeated() &&
      at->index >= at->message->GetReflection()->FieldSize(*at->message, at->field)) {
    return absl::InvalidArgumentError(absl::StrCat("'", path, "' has no such element"));
  }
  return ToText(*at->message, at->field, at->index);
}

}  // namespace shardd::contract
