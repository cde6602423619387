// How shardctl writes: tables for people, JSON for programs.
#ifndef SHARDD_CLIENT_CLI_OUTPUT_H_
#define SHARDD_CLIENT_CLI_OUTPUT_H_

#include <google/protobuf/message.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace shardd::cli {

// Keeps the order in which keys are added.
using Json = nlohmann::ordered_json;

enum class OutputFormat { kTable, kJson };

// A table with a header line; columns are as wide as their widest cell. Columns
// of numbers are set right.
class Table {
 public:
  explicit Table(std::vector<std::string> header);
  // As many cells as the header has.
  void AddRow(std::vector<std::string> cells);
  std::string Text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// "NAME  VALUE" lines, names padded to one width.
std::string NamedValues(const std::vector<std::pair<std::string, std::string>>& values);

// Every field with its .proto name, also those at their default; 64-bit integers
// as numbers, enums by name, bytes in hex, and doubles that are not finite as
// "nan", "inf", "-inf".
Json ToJson(const google::protobuf::Message& message);

// 1536 -> "1.5 KiB".
std::string FormatBytes(uint64_t bytes);
// 0.25 -> "0.2s", 90 -> "1m30s", 7200 -> "2h00m".
std::string FormatSeconds(double seconds);
// At most `digits` significant digits; "nan", "inf".
std::string FormatNumber(double value, int digits);

}  // namespace shardd::cli

#endif  // SHARDD_CLIENT_CLI_OUTPUT_H_
