#include "client/cli/output.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace shardd::cli {

namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

bool IsNumber(const std::string& cell) {
  return !cell.empty() && (std::isdigit(static_cast<unsigned char>(cell[0])) || cell == "-");
}

Json DoubleToJson(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

// Element `index` of a repeated field, or the singular one when index is -1.
Json FieldToJson(const Message& message, const FieldDescriptor* field, int index) {
  const google::protobuf::Reflection* r = message.GetReflection();
  bool many = index >= 0;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return many ? r->GetRepeatedInt32(message, field, index) : r->GetInt32(message, field);
    case FieldDescriptor::CPPTYPE_INT64:
      return many ? r->GetRepeatedInt64(message, field, index) : r->GetInt64(message, field);
    case FieldDescriptor::CPPTYPE_UINT32:
      return many ? r->GetRepeatedUInt32(message, field, index) : r->GetUInt32(message, field);
    case FieldDescriptor::CPPTYPE_UINT64:
      return many ? r->GetRepeatedUInt64(message, field, index) : r->GetUInt64(message, field);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return DoubleToJson(many ? r->GetRepeatedDouble(message, field, index)
                               : r->GetDouble(message, field));
    case FieldDescriptor::CPPTYPE_FLOAT:
      return DoubleToJson(many ? r->GetRepeatedFloat(message, field, index)
                               : r->GetFloat(message, field));
    case FieldDescriptor::CPPTYPE_BOOL:
      return many ? r->GetRepeatedBool(message, field, index) : r->GetBool(message, field);
    case FieldDescriptor::CPPTYPE_ENUM:
      return (many ? r->GetRepeatedEnum(message, field, index) : r->GetEnum(message, field))
          ->name();
    case FieldDescriptor::CPPTYPE_STRING: {
      std::string text =
          many ? r->GetRepeatedString(message, field, index) : r->GetString(message, field);
      return field->type() == FieldDescriptor::TYPE_BYTES ? absl::BytesToHexString(text) : text;
    }
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return ToJson(many ? r->GetRepeatedMessage(message, field, index)
                         : r->GetMessage(message, field));
  }
  return nullptr;
}

}  // namespace

Table::Table(std::vector<std::string> header) { rows_.push_back(std::move(header)); }

void Table::AddRow(std::vector<std::string> cells) {
  cells.resize(rows_[0].size());
  rows_.push_back(std::move(cells));
}

std::string Table::Text() const {
  size_t columns = rows_[0].size();
  std::vector<size_t> width(columns, 0);
  std::vector<bool> right(columns, rows_.size() > 1);
  for (size_t r = 0; r < rows_.size(); ++r) {
    for (size_t c = 0; c < columns; ++c) {
      width[c] = std::max(width[c], rows_[r][c].size());
      if (r > 0 && !IsNumber(rows_[r][c])) right[c] = false;
    }
  }
  std::string text;
  for (const std::vector<std::string>& row : rows_) {
    std::string line;
    for (size_t c = 0; c < columns; ++c) {
      std::string pad(width[c] - row[c].size(), ' ');
      absl::StrAppend(&line, c == 0 ? "" : "  ", right[c] ? pad + row[c] : row[c] + pad);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&text, line, "\n");
  }
  return text;
}

std::string NamedValues(const std::vector<std::pair<std::string, std::string>>& values) {
  size_t width = 0;
  for (const auto& [name, value] : values) width = std::max(width, name.size());
  std::string text;
  for (const auto& [name, value] : values) {
    absl::StrAppend(&text, name, std::string(width + 2 - name.size(), ' '), value, "\n");
  }
  return text;
}

Json ToJson(const Message& message) {
  Json object = Json::object();
  const google::protobuf::Descriptor* type = message.GetDescriptor();
  for (int i = 0; i < type->field_count(); ++i) {
    const FieldDescriptor* field = type->field(i);
    if (field->is_repeated()) {
      Json array = Json::array();
      int size = message.GetReflection()->FieldSize(message, field);
      for (int k = 0; k < size; ++k) array.push_back(FieldToJson(message, field, k));
      object[field->name()] = std::move(array);
    } else {
      object[field->name()] = FieldToJson(message, field, -1);
    }
  }
  return object;
}

std::string FormatBytes(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? absl::StrCat(bytes, " B") : absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string FormatSeconds(double seconds) {
  if (seconds < 60) return absl::StrFormat("%.1fs", seconds);
  auto whole = static_cast<int64_t>(seconds);
  if (whole < 3600) return absl::StrFormat("%dm%02ds", whole / 60, whole % 60);
  if (whole < 86400) return absl::StrFormat("%dh%02dm", whole / 3600, whole / 60 % 60);
  return absl::StrFormat("%dd%02dh", whole / 86400, whole / 3600 % 24);
}

std::string FormatNumber(double value, int digits) {
  return absl::StrFormat("%.*g", digits, value);
}

}  // namespace shardd::cli
