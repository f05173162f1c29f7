#include "common/check.h"

#include <sstream>
#include <stdexcept>

namespace ridgeline {

void fail(std::initializer_list<MessagePart> parts) {
  std::ostringstream message;
  for (const MessagePart& part : parts) {
    switch (part.kind) {
      case MessagePart::Kind::kReal: message << part.real; break;
      case MessagePart::Kind::kInteger: message << part.integer; break;
      case MessagePart::Kind::kText: message << part.text; break;
    }
  }
  throw std::invalid_argument(message.str());
}

}  // namespace ridgeline
